"""Every strategy, optimizer and engine, one entry each, for both halves; a new one is an entry here and its file.

Standard library only: the parent reads this folder as `trainfast_runner.worker.catalog`, the worker as
`trainfast_worker.catalog`. So entries are known by their names, and classes by their paths.
"""

from __future__ import annotations

from .engines import ENGINES, EngineEntry
from .optimizers import OPTIMIZERS, OptimizerEntry, nearest_optimizer
from .strategies import (
    PARAMETER_FORMS,
    SCHEDULES,
    STRATEGIES,
    StrategyEntry,
    nearest_strategy,
    strategies_obeying,
)

__all__ = [
    "ENGINES",
    "OPTIMIZERS",
    "PARAMETER_FORMS",
    "SCHEDULES",
    "STRATEGIES",
    "EngineEntry",
    "OptimizerEntry",
    "StrategyEntry",
    "allows_warm_trials",
    "nearest_optimizer",
    "nearest_strategy",
    "packages",
    "strategies_obeying",
]


def packages() -> tuple[str, ...]:
    """Packages that some entry needs."""
    entries: list[StrategyEntry | OptimizerEntry | EngineEntry]
    entries = [*STRATEGIES.values(), *OPTIMIZERS.values(), *ENGINES.values()]
    return tuple(dict.fromkeys(entry.package for entry in entries if entry.package is not None))


def allows_warm_trials(strategy: str, engine: str, compile: str) -> bool:
    """True if one process can train one setting after another with this strategy, engine and `compile`.

    Every compiled setting is another program, which warms nothing for the next.
    """
    return STRATEGIES[strategy].allows_warm_trials and ENGINES[engine].allows_warm_trials and compile == "off"
