"""Hooks into modules, such as the frameworks that count steps themselves, called once a module has been executed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from typing import Any

from .notes import never_raises


def hook_modules(hooks: Mapping[str, Callable[[Any], None]]) -> None:
    """Call each hook with its module: now, at the end of an execution under way, or when the module is imported.

    A module that imports torch itself is under way when torch's import installs the hooks.
    """
    awaited = {name: hook for name, hook in hooks.items() if name not in sys.modules}
    if awaited:
        sys.meta_path.insert(0, _AwaitedModules(awaited))
    for name in hooks.keys() - awaited.keys():
        _hook_loaded(sys.modules[name], hooks[name])


@never_raises
def _hook_loaded(module: Any, hook: Callable[[Any], None]) -> None:
    spec = module.__spec__
    if isinstance(spec, _ExecutedSpec):
        spec.hooks.append(hook)
    elif getattr(spec, "_initializing", False):
        spec.__class__ = _ExecutedSpec
        spec.hooks = [hook]
    else:
        never_raises(hook)(module)


class _ExecutedSpec(ModuleSpec):
    """The spec of a module under execution; importlib sets its `_initializing` to False at the end."""

    hooks: list[Callable[[Any], None]]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            self.__class__ = ModuleSpec  # type: ignore[assignment]
            hooks = self.__dict__.pop("hooks")
            # A failed execution has removed the module.
            if self.name in sys.modules:
                for hook in hooks:
                    never_raises(hook)(sys.modules[self.name])


class _AwaitedModules:
    """Finds the awaited modules as the other finders do; each hook gets its module after the module's execution."""

    def __init__(self, hooks: Mapping[str, Callable[[Any], None]]) -> None:
        self._hooks = dict(hooks)
        self._finding: set[str] = set()
        """The modules that the other finders look for now."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
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
