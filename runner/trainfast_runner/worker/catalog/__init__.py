"""Every strategy, optimizer, engine and lever, one entry each, for both halves; a new one is an entry and its file.

Standard library only: the parent reads this folder as `trainfast_runner.worker.catalog`, the worker as
`trainfast_worker.catalog`. So entries are known by their names, and classes by their paths.
"""

from dataclasses import dataclass, replace

from .levers import ADAPTER_KNOBS as ADAPTER_KNOBS
from .levers import ALLOCATOR_VARIABLES as ALLOCATOR_VARIABLES
from .levers import ATTENTION_IMPLEMENTATIONS as ATTENTION_IMPLEMENTATIONS
from .levers import FIRST_VERSIONS as FIRST_VERSIONS
from .levers import LEVERS as LEVERS
from .levers import LEVERS_TAKEN as LEVERS_TAKEN
from .levers import WITH_ADAPTERS as WITH_ADAPTERS
from .levers import LeverEntry as LeverEntry
from .levers import LeverValue as LeverValue
from .levers import compile_mode as compile_mode
from .levers import has_liger_kernels as has_liger_kernels
from .levers import lever_packages
from .levers import levers_of_fields as levers_of_fields
from .levers import named_fields as named_fields
from .optimizers import OPTIMIZERS as OPTIMIZERS
from .optimizers import OptimizerEntry as OptimizerEntry
from .optimizers import nearest_optimizer as nearest_optimizer
from .strategies import EXPERT_STYLES as EXPERT_STYLES
from .strategies import OUR_TENSOR_PLANS as OUR_TENSOR_PLANS
from .strategies import PARAMETER_FORMS as PARAMETER_FORMS
from .strategies import PIPELINE_OBJECTIVES as PIPELINE_OBJECTIVES
from .strategies import SCHEDULES as SCHEDULES
from .strategies import SEQUENCE_FAMILIES as SEQUENCE_FAMILIES
from .strategies import STRATEGIES as STRATEGIES
from .strategies import TENSOR_STYLES as TENSOR_STYLES
from .strategies import WHOLE as WHOLE
from .strategies import StrategyEntry as StrategyEntry
from .strategies import nearest_strategy as nearest_strategy
from .strategies import strategies_obeying as strategies_obeying


@dataclass(frozen=True, kw_only=True)
class EngineEntry:
    """An engine, which runs the loop. `what` and `speed` are its help."""

    name: str
    path: str
    """`module:Class` below worker/engines."""
    what: str
    speed: str = ""
    strategies: tuple[str, ...] = ()
    """Strategies that the engine can run; empty for all."""
    compiles: bool = True
    """True if the engine obeys the `compile` knob."""
    allows_warm_trials: bool = False
    """True if one process can train one setting after another with the engine."""
    fp16_on_cpu: bool = True
    """False if the engine silently trains in fp32 where fp16 is asked for on a CPU."""
    package: str | None = None
    """The package that has to be installed."""
    fallback: str = "native"
    """The engine to take where this one cannot run."""

    def runs(self, strategy: str) -> bool:
        """True if the engine can run the strategy of this name."""
        return not self.strategies or strategy in self.strategies


_ACCELERATE = EngineEntry(
    name="accelerate",
    path="accelerate_loop:AccelerateLoop",
    what="the short Accelerate loop, on the same samples and loss",
    # Asked for FSDP on a CPU, both other engines silently train DDP.
    strategies=("single", "ddp"),
    compiles=False,
    fp16_on_cpu=False,
    package="accelerate",
)
_ENGINES = (
    EngineEntry(name="native", path="base:Engine", what="the loop here", allows_warm_trials=True),
    _ACCELERATE,
    replace(
        _ACCELERATE,
        name="trainer",
        path="hf_trainer:HfTrainer",
        what="the Hugging Face Trainer, on the same samples and loss",
        speed="does a little more around each step",
    ),
)
ENGINES = {entry.name: entry for entry in _ENGINES}
"""All engines, by name."""


def packages() -> tuple[str, ...]:
    """Packages that some entry needs."""
    entries: list[StrategyEntry | OptimizerEntry | EngineEntry]
    entries = [*STRATEGIES.values(), *OPTIMIZERS.values(), *ENGINES.values()]
    needed = [entry.package for entry in entries if entry.package is not None]
    return tuple(dict.fromkeys([*needed, *lever_packages()]))


def allows_warm_trials(strategy: str, engine: str, compile: str) -> bool:
    """True if one process can train one setting after another with this strategy, engine and `compile`.

    Every compiled setting is another program, which warms nothing for the next.
    """
    return STRATEGIES[strategy].allows_warm_trials and ENGINES[engine].allows_warm_trials and compile == "off"
