"""Steps of a DeepSpeed engine, which steps its inner optimizer once for each group of parameters."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from .notes import never_raises

if TYPE_CHECKING:
    from .script_run import ScriptRun

DEEPSPEED = "DeepSpeed"
"""DeepSpeed, as a run's framework is recorded."""


def install(module: Any, run: ScriptRun) -> None:
    """Follow `DeepSpeedEngine.step` of `module`, which is `deepspeed.runtime.engine`."""
    step = module.DeepSpeedEngine.step

    @functools.wraps(step)
    def followed(self: Any, *args: Any, **kwargs: Any) -> Any:
        begin()
        steps_before = self.global_steps
        result = step(self, *args, **kwargs)
        if self.global_steps != steps_before:
            count(self)
        return result

    @never_raises
    def begin() -> None:
        # The Trainer and Lightning count their own steps, and report before the engine's first step.
        if run.steps.framework is None:
            run.steps.count_steps_of(DEEPSPEED)

    @never_raises
    def count(engine: Any) -> None:
        # The engine's optimizer holds flat partitions, which belong to no module of the model.
        run.actual.update(wrapper=type(engine).__name__, zero_stage=engine.zero_optimization_stage())
        asked = engine.train_micro_batch_size_per_gpu() * engine.gradient_accumulation_steps()
        if run.steps.source == DEEPSPEED and run.steps.record_step(samples=run.steps.samples_beside(asked)):
            raise SystemExit(0)

    module.DeepSpeedEngine.step = followed
