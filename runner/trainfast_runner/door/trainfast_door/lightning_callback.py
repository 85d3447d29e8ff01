"""Steps of Lightning, by a callback that its entry points `callbacks_factory` add to every Trainer."""

from __future__ import annotations

import importlib
from typing import Any

from .model_hook import leading_size
from .notes import never_raises
from .script_run import ScriptRun, current_run
from .step_log import FACTS_AFTER

LIGHTNING = "Lightning"
"""Lightning, as a run's framework is recorded."""
PRECISION_BY_LIGHTNING_NAME = {"32-true": "fp32", "16-mixed": "fp16", "bf16-mixed": "bf16", "bf16-true": "bf16-pure"}
"""The knob's value by Lightning's name of a precision."""
DTYPE_BY_LIGHTNING_NAME = {"16": "float16", "bf16": "bfloat16"}
"""The compute dtypes of Lightning's precisions, by the beginning of their names."""


def callbacks_of_lightning() -> list[Any]:
    """The callback for package `lightning`; none outside a run."""
    return _callbacks("lightning.pytorch.callbacks") or []


def callbacks_of_pytorch_lightning() -> list[Any]:
    """The callback for package `pytorch_lightning`; none outside a run."""
    return _callbacks("pytorch_lightning.callbacks") or []


@never_raises
def _callbacks(module: str) -> list[Any] | None:
    """A list of the callback, empty outside a run; None after an error."""
    run = current_run()
    return [] if run is None else [_callback_class(importlib.import_module(module).Callback, run)()]


def _callback_class(base: Any, run: ScriptRun) -> Any:
    class LightningSteps(base):  # type: ignore[misc]
        _steps_before = _samples = 0
        _reads_left = FACTS_AFTER
        # Lightning profiles the call of each hook, 4 us for an empty one. It skips a hook that cannot be called.
        on_train_batch_start = on_before_zero_grad = on_before_backward = None
        on_after_backward = on_before_optimizer_step = None

        @never_raises
        def on_train_start(self, trainer: Any, module: Any) -> None:
            run.steps.count_steps_of(LIGHTNING)
            self._steps_before = trainer.global_step
            run.ran.update(knobs_of_trainer(trainer))

        @never_raises
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self._samples += leading_size(batch) or 0
            # `global_step` counts optimizer steps; accumulation alone does not change it.
            if trainer.global_step == self._steps_before:
                return
            self._steps_before = trainer.global_step
            loss: Any = outputs.get("loss") if isinstance(outputs, dict) else outputs
            step_loss = None
            if loss is not None and loss.device.type == "cpu":
                # Lightning divides the loss by the batches that it accumulates.
                step_loss = float(loss.detach()) * (
                    trainer.accumulate_grad_batches if module.automatic_optimization else 1
                )
            elif loss is not None:
                run.steps.unknown["loss"] = "reading it would stall the GPU"
            if self._reads_left:
                # Lightning does not call the model's own forward: no hook sees the compute dtype.
                self._reads_left -= 1
                run.actual.update(compute_dtype_of_trainer(trainer))
            samples, self._samples = self._samples or None, 0
            if run.steps.record_step(samples=samples, loss=step_loss):
                trainer.should_stop = True

        @never_raises
        def on_train_end(self, trainer: Any, module: Any) -> None:
            run.end_training()

    return LightningSteps


def knobs_of_trainer(trainer: Any) -> dict[str, Any]:
    """Values of the knobs that Lightning's Trainer set."""
    precision = str(trainer.precision)
    return {
        "precision": PRECISION_BY_LIGHTNING_NAME.get(precision, precision),
        "grad_accum": trainer.accumulate_grad_batches,
        "grad_clip": trainer.gradient_clip_val or 0.0,
    }


def compute_dtype_of_trainer(trainer: Any) -> dict[str, str]:
    """The dtype of half precision as a field of `actual`; empty without it."""
    dtype = DTYPE_BY_LIGHTNING_NAME.get(str(trainer.precision).partition("-")[0])
    return {} if dtype is None else {"compute_dtype": dtype}
