"""Hooks into modules, each called once its module has been executed, and those that keep a trial from saving."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

from .notes import never_raises
from .script_run import ScriptRun

if TYPE_CHECKING:
    Hook = Callable[[Any], None]


def hook_modules(hooks: Mapping[str, Hook]) -> None:
    """Call each hook with its module: now, at the end of an execution under way, or when the module is imported.

    A module that imports torch itself is under way when torch's import installs the hooks.
    """
    awaited = {name: hook for name, hook in hooks.items() if name not in sys.modules}
    if awaited:
        sys.meta_path.insert(0, _AwaitedModules(awaited))
    for name in hooks.keys() - awaited.keys():
        module = sys.modules[name]
        spec = getattr(module, "__spec__", None)
        if getattr(spec, "_initializing", False):
            _call_at_end(spec, hooks[name])
        else:
            never_raises(hooks[name])(module)


@never_raises
def _call_at_end(spec: Any, hook: Hook) -> None:
    """Call the hook once the module of `spec` has been executed."""
    if not isinstance(spec, _ExecutedSpec):
        spec.__class__ = _ExecutedSpec
        spec.hooks = []
    spec.hooks.append(hook)


class _ExecutedSpec(ModuleSpec):
    """The spec of a module to execute; importlib sets its `_initializing` to False at the end."""

    hooks: list[Hook]

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
    """Finds the awaited modules as the other finders do."""

    def __init__(self, hooks: Mapping[str, Hook]) -> None:
        self._hooks = hooks
        self._finding: set[str] = set()
        """The modules that the other finders look for now."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The spec of an awaited module, which calls the hook if the module is executed; None for any other."""
        if name not in self._hooks or name in self._finding:
            return None
        self._finding.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._finding.discard(name)
        if spec is not None:
            _call_at_end(spec, self._hooks[name])
        return spec


UPLOAD_METHODS = ("upload_file", "upload_folder", "create_commit", "preupload_lfs_files")
"""Upload methods of the Hub's `HfApi`. Its module also exports them as functions bound to one instance, so both
are replaced."""
SAVE_FUNCTIONS = {
    "torch": ("save",),
    "safetensors.torch": ("save_file", "save_model"),
    "transformers.modeling_utils": ("PreTrainedModel.save_pretrained", "PreTrainedModel.push_to_hub"),
    "transformers.tokenization_utils_base": (
        "PreTrainedTokenizerBase.save_pretrained",
        "PreTrainedTokenizerBase.push_to_hub",
    ),
    "transformers.trainer": ("Trainer.save_model", "Trainer._save_checkpoint", "Trainer.push_to_hub"),
    "accelerate.accelerator": ("Accelerator.save_state", "Accelerator.save_model", "Accelerator.save"),
    "torch.distributed.checkpoint.state_dict_saver": ("save", "async_save"),
    "lightning.pytorch.trainer.trainer": ("Trainer.save_checkpoint",),
    "pytorch_lightning.trainer.trainer": ("Trainer.save_checkpoint",),
    "deepspeed.runtime.engine": ("DeepSpeedEngine.save_checkpoint", "DeepSpeedEngine.save_16bit_model"),
    "huggingface_hub.hf_api": (*UPLOAD_METHODS, *(f"HfApi.{name}" for name in UPLOAD_METHODS)),
}
"""Functions that write checkpoints or upload them, by module; in a trial they do nothing."""


def install(run: ScriptRun) -> None:
    """Keep a trial from saving; does nothing in any other run."""
    if run.is_trial:
        run.suppressed["experiment trackers"] = None
        hook_modules({name: functools.partial(_silence, names, run) for name, names in SAVE_FUNCTIONS.items()})


def _silence(names: tuple[str, ...], run: ScriptRun, module: Any) -> None:
    """Replace functions and methods of a module by ones that only note the call.

    The script's globals that name them are replaced too.
    """
    script = vars(sys.modules["__main__"])
    for name in names:
        owner_name, _, function_name = name.rpartition(".")
        owner = getattr(module, owner_name, None) if owner_name else module
        function = getattr(owner, function_name, None)
        if function is None:
            continue
        silent = _silenced(function, f"{module.__name__.partition('.')[0]}: {name}", run)
        setattr(owner, function_name, silent)
        script.update({name: silent for name, member in script.items() if member is function})


def _silenced(function: Any, label: str, run: ScriptRun) -> Any:
    @functools.wraps(function)
    def silent(*_args: Any, **_more: Any) -> None:
        run.suppressed[label] = None

    return silent
