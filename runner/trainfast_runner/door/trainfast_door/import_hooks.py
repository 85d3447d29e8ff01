"""A finder that waits for modules, such as the frameworks that count steps themselves, and hooks each when imported."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any

from .notes import never_raises


class ImportHooks:
    """Finds the awaited modules as the other finders do; each hook gets its module after the module's execution."""

    def __init__(self, hooks: Mapping[str, Callable[[Any], None]]) -> None:
        self._hooks = dict(hooks)
        self._finding: set[str] = set()
        """The modules that the other finders look for now."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The spec of an awaited module, None for any other. A look-up alone leaves the hook in place."""
        if name not in self._hooks or name in self._finding:
            return None
        self._finding.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._finding.discard(name)
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader, name)
        return spec

    @never_raises
    def _follow(self, loader: Any, name: str) -> None:
        execute = loader.exec_module

        def executed(module: Any) -> None:
            execute(module)
            hook = self._hooks.pop(name, None)
            if hook is None:
                return
            if not self._hooks and self in sys.meta_path:
                sys.meta_path.remove(self)
            never_raises(hook)(module)

        # Replace the method on the instance, so that other tools still see the loader's own type.
        loader.exec_module = executed
