"""The engines, one entry each. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, replace


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
