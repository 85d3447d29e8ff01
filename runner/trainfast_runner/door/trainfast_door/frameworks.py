"""Hooks into the frameworks that count steps themselves, each installed in its module."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import deepspeed_engine, knobs_without_flag, trainer_callback
from .import_hooks import hook_modules

if TYPE_CHECKING:
    from .script_run import ScriptRun


def install(run: ScriptRun) -> None:
    """Hook the Trainer, its arguments and DeepSpeed's engine."""
    hooks: dict[str, Callable[[Any, ScriptRun], None]] = {
        "transformers.trainer": trainer_callback.install,
        "transformers.training_args": knobs_without_flag.set_trainer_fields,
        "deepspeed.runtime.engine": deepspeed_engine.install,
    }
    hook_modules({name: _of_run(hook, run) for name, hook in hooks.items()})


def _of_run(hook: Callable[[Any, ScriptRun], None], run: ScriptRun) -> Callable[[Any], None]:
    @functools.wraps(hook)
    def with_run(module: Any) -> None:
        hook(module, run)

    return with_run
