"""Keep the script of a trial from saving and uploading its model."""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING, Any

import torch

from .import_hooks import hook_modules

if TYPE_CHECKING:
    from .script_run import ScriptRun

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
    _silence(torch, ("save",), run)
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
