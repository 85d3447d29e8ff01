"""Hooks into modules, such as the frameworks that count steps themselves, called once a module has been executed."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from typing import Any

from .notes import never_raises
from .script_run import ScriptRun


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


SANDBOX_FOLDER = "sandbox"
"""The folder of a trial's own files in the run directory."""
UPLOAD_METHODS = ("upload_file", "upload_folder", "create_commit", "preupload_lfs_files")
"""Upload methods of the Hub's `HfApi`. Its module also exports them as functions bound to one instance, so both
are replaced."""
SAVE_FUNCTIONS = {
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

SILENT_MARK = "_trainfast_silent"
"""Marks a function that was replaced."""


def install(run: ScriptRun) -> None:
    """Keep a trial from saving; does nothing in any other run."""
    if not run.is_trial:
        return
    run.suppress("experiment trackers")
    _silence(sys.modules["torch"], ("save",), run)
    hook_modules({name: functools.partial(_silence, names=names, run=run) for name, names in SAVE_FUNCTIONS.items()})


def sandbox_fields(run: ScriptRun) -> dict[str, Any]:
    """Fields of TrainingArguments that keep a trial's files in its folder; empty in any other run."""
    if not run.is_trial:
        return {}
    return {
        "output_dir": os.path.join(run.files.directory, SANDBOX_FOLDER),
        "save_strategy": "no",
        "eval_strategy": "no",
        "load_best_model_at_end": False,
        "push_to_hub": False,
        "report_to": "none",
        "auto_find_batch_size": False,
    }


def _silence(module: Any, names: tuple[str, ...], run: ScriptRun) -> None:
    """Replace functions and methods of a module by ones that only note the call.

    The script's globals that name them are replaced too.
    """
    script = vars(sys.modules["__main__"])
    for name in names:
        *owner_names, function_name = name.split(".")
        owner = getattr(module, owner_names[0], None) if owner_names else module
        function = getattr(owner, function_name, None)
        if function is None or hasattr(function, SILENT_MARK):
            continue
        silent = _silenced(function, f"{module.__name__.partition('.')[0]}: {name}", run)
        setattr(owner, function_name, silent)
        script.update({name: silent for name, member in script.items() if member is function})


def _silenced(function: Any, label: str, run: ScriptRun) -> Any:
    @functools.wraps(function)
    def silent(*args: Any, **kwargs: Any) -> None:
        run.suppress(label)

    setattr(silent, SILENT_MARK, True)
    return silent
