"""The engines, one entry each. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class EngineEntry:
    """An engine, which runs the loop. `what` and `speed` are the help a person reads."""

    name: str
    path: str
    """`module:Class` below worker/engines."""
    what: str
    speed: str = ""
    strategies: tuple[str, ...] = ()
    """Strategies it can run; empty for all."""
    compiles: bool = True
    """True if it obeys the `compile` knob."""
    allows_warm_trials: bool = False
    """True if one process can train one setting after another with it."""
    fp16_on_cpu: bool = True
    """False if it silently trains in fp32 where fp16 is asked for on a CPU."""
    package: str | None = None
    """The package that has to be installed."""
    fallback: str = "native"

    def runs(self, strategy: str) -> bool:
        """True if it can run a strategy of this name."""
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
