"""A finder that waits for the frameworks that count steps themselves, and hooks each when it has been imported."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .notes import never_raises

if TYPE_CHECKING:
    from .script_run import ScriptRun


def install(run: ScriptRun) -> None:
    """Wait for the Trainer, its arguments and DeepSpeed's engine."""
    from . import asked_knobs, deepspeed_engine, trainer_callback

    hooks: dict[str, Callable[[Any, ScriptRun], None]] = {
        "transformers.trainer": trainer_callback.install,
        "transformers.training_args": asked_knobs.set_trainer_fields,
        "deepspeed.runtime.engine": deepspeed_engine.install,
    }
    sys.meta_path.insert(0, FrameworkFinder(hooks, run))


class FrameworkFinder:
    """Finds the awaited modules as the other finders do; each one's hook follows its execution."""

    def __init__(self, hooks: dict[str, Callable[[Any, ScriptRun], None]], run: ScriptRun) -> None:
        self._hooks = hooks
        self._run = run

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The spec of an awaited module, None for any other."""
        if name not in self._hooks:
            return None
        hook = self._hooks.pop(name)
        if not self._hooks:
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader, hook)
        return spec

    @never_raises
    def _follow(self, loader: Any, hook: Callable[[Any, ScriptRun], None]) -> None:
        execute = loader.exec_module

        def executed(module: Any) -> None:
            execute(module)
            never_raises(hook)(module, self._run)

        # Replace the method on the instance, so that other tools still see the loader's own type.
        loader.exec_module = executed
