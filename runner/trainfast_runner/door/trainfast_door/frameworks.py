"""Hooks into the frameworks that count steps themselves, and into torch's builds, each installed in its module."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import deepspeed_engine, knobs_without_flag, trainer_callback
from .import_hooks import hook_modules
from .notes import never_raises

if TYPE_CHECKING:
    from .script_run import ScriptRun


def install(run: ScriptRun) -> None:
    """Hook the Trainer, its arguments, DeepSpeed's engine and the builds of extensions."""
    hooks: dict[str, Callable[[Any, ScriptRun], None]] = {
        "transformers.trainer": trainer_callback.install,
        "transformers.training_args": knobs_without_flag.set_trainer_fields,
        "deepspeed.runtime.engine": deepspeed_engine.install,
        "torch.utils.cpp_extension": _record_builds,
    }
    hook_modules({name: _of_run(hook, run) for name, hook in hooks.items()})


def _record_builds(module: Any, run: ScriptRun) -> None:
    """Make each build of an extension a phase of its own."""
    for name in ("load", "load_inline"):
        setattr(module, name, _recorded(getattr(module, name), module, run))


def _recorded(build: Callable[..., Any], module: Any, run: ScriptRun) -> Callable[..., Any]:
    @never_raises
    def enters_build(name: str, build_directory: str | None = None, **_options: Any) -> bool:
        directory = build_directory or module._get_build_directory(name, verbose=False)
        if os.path.exists(os.path.join(directory, f"{name}.so")):
            return False
        run.files.write("phase", phase="compile", detail=name)
        return True

    @functools.wraps(build)
    def recorded(*arguments: Any, **options: Any) -> Any:
        is_build = enters_build(*arguments[:1], **options)
        try:
            return build(*arguments, **options)
        finally:
            if is_build:
                never_raises(run.files.write)("phase", phase="train" if run.files.are_ours else "")

    return recorded


def _of_run(hook: Callable[[Any, ScriptRun], None], run: ScriptRun) -> Callable[[Any], None]:
    @functools.wraps(hook)
    def with_run(module: Any) -> None:
        hook(module, run)

    return with_run
