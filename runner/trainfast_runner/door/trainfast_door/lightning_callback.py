"""Steps of Lightning, by a callback that its entry points `callbacks_factory` add to every Trainer."""

from __future__ import annotations

import importlib
from typing import Any

from .notes import never_raises
from .script_run import ScriptRun, current_run

NAME = "Lightning"


def callbacks_of_lightning() -> list[Any]:
    """The callback for package `lightning`; none outside a run."""
    return _callbacks("lightning.pytorch.callbacks") or []


def callbacks_of_pytorch_lightning() -> list[Any]:
    """The callback for package `pytorch_lightning`; none outside a run."""
    return _callbacks("pytorch_lightning.callbacks") or []


@never_raises
def _callbacks(module: str) -> list[Any]:
    run = current_run()
    return [] if run is None else [_callback_class(importlib.import_module(module).Callback, run)()]


def _callback_class(base: Any, run: ScriptRun) -> Any:
    class TrainfastCallback(base):  # type: ignore[misc]
        _steps_before = 0

        @never_raises
        def on_train_start(self, trainer: Any, module: Any) -> None:
            run.steps.claim(NAME)
            self._steps_before = trainer.global_step

        @never_raises
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            # It counts optimizer steps: a batch that only accumulates gradients leaves it.
            if trainer.global_step == self._steps_before:
                return
            self._steps_before = trainer.global_step
            loss: Any = outputs.get("loss") if isinstance(outputs, dict) else outputs
            known = None
            if loss is not None and loss.device.type == "cpu":
                known = float(loss.detach())
            elif loss is not None:
                run.steps.unknown["loss"] = "reading it would stall the GPU"
            if run.steps.count(loss=known):
                trainer.should_stop = True

        @never_raises
        def on_train_end(self, trainer: Any, module: Any) -> None:
            run.end_framework()
            if run.is_trial:
                raise SystemExit(0)

    return TrainfastCallback
