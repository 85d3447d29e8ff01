"""A finder that waits for modules, such as the frameworks that count steps themselves, and hooks each when imported."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any

from .notes import never_raises


class ImportHooks:
    """Finds the awaited modules as the other finders do; each one's hook gets the module after its execution."""

    def __init__(self, hooks: Mapping[str, Callable[[Any], None]]) -> None:
        self._hooks = dict(hooks)

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
    def _follow(self, loader: Any, hook: Callable[[Any], None]) -> None:
        execute = loader.exec_module
        followed = never_raises(hook)

        def executed(module: Any) -> None:
            execute(module)
            followed(module)

        # Replace the method on the instance, so that other tools still see the loader's own type.
        loader.exec_module = executed
