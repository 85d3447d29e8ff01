"""A trial of a search: its memory is limited, nothing that it trains is saved, and it ends after its steps."""

from __future__ import annotations

import functools
import os
import resource
import sys
from typing import TYPE_CHECKING, Any

import torch

from .framework_finder import FrameworkFinder
from .memory_peaks import status_sizes
from .notes import never_raises

if TYPE_CHECKING:
    from .script_run import ScriptRun

FOLDER = "sandbox"
"""The folder of a trial's own files in the run directory."""
SAVES = {
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
    "huggingface_hub.hf_api": ("HfApi.upload_file", "HfApi.upload_folder", "HfApi.create_commit"),
}
"""Functions that write checkpoints or upload them, by module; a trial calls none of them."""

SILENT = "_trainfast_silent"
"""Marks a function that was replaced."""


def install(run: ScriptRun) -> None:
    """Keep a trial from saving; does nothing in any other run."""
    if not run.is_trial:
        return
    run.suppress("experiment trackers")
    _silence(torch, ("save",), run)
    hooks = {name: functools.partial(_silence, names=names, run=run) for name, names in SAVES.items()}
    sys.meta_path.insert(0, FrameworkFinder(hooks))


@never_raises
def silence_loaded(run: ScriptRun) -> None:
    """Keep the modules from saving that were being loaded when the hooks came: those that import torch themselves."""
    if run.is_trial:
        for name, names in SAVES.items():
            if name in sys.modules:
                _silence(sys.modules[name], names, run)


def sandbox_fields(run: ScriptRun) -> dict[str, Any]:
    """Fields of TrainingArguments that keep a trial's files in its folder; empty in any other run."""
    if not run.is_trial:
        return {}
    return {
        "output_dir": os.path.join(run.files.directory, FOLDER),
        "save_strategy": "no",
        "eval_strategy": "no",
        "load_best_model_at_end": False,
        "push_to_hub": False,
        "report_to": "none",
        "auto_find_batch_size": False,
    }


@never_raises
def limit_memory(run: ScriptRun) -> None:
    """Set a trial's `memory_limit`, before the process has a model: on a CPU at what its data take now and the limit.

    On a CPU the allocator itself then refuses; its thread pools are started before.
    """
    if not run.is_trial or not run.limits_bytes:
        return
    limit_bytes = run.limits_bytes[min(run.files.rank, len(run.limits_bytes) - 1)]
    if run.device == "cuda":
        device = int(os.environ.get("LOCAL_RANK") or 0)
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total_bytes), device)
        return
    with torch.enable_grad():
        warm = torch.ones(1024, 1024, dtype=torch.float32, device="cpu", requires_grad=True)
        (warm @ warm).sum().backward()  # type: ignore[no-untyped-call]
    del warm
    run.limit_gauge = LimitGauge()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = status_sizes("VmData")[0] + limit_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


class LimitGauge:
    """Reads the peak of the private writable memory that RLIMIT_DATA counts, since the limit was set.

    The kernel keeps the peak of all address space (VmPeak): less the growth of the rest it is the data's.
    """

    def __init__(self) -> None:
        self._first_peak, self._first_size, self._first_data = self._sizes()

    def peak_bytes(self) -> int | None:
        """The growth; None until address space has passed its peak from before."""
        peak, size, data = self._sizes()
        if peak <= self._first_peak:
            return None
        others = (size - data) - (self._first_size - self._first_data)
        return max(0, peak - self._first_size - max(0, others))

    def _sizes(self) -> list[int]:
        """The peak of all address space, its size, and the data's."""
        return status_sizes("VmPeak", "VmSize", "VmData")


def _silence(module: Any, names: tuple[str, ...], run: ScriptRun) -> None:
    """Replace these functions and methods of a module by ones that note the call and do nothing.

    Also where the script has taken a function by its name.
    """
    script = vars(sys.modules["__main__"])
    for name in names:
        *before, last = name.split(".")
        owner = getattr(module, before[0], None) if before else module
        function = getattr(owner, last, None)
        if function is None or hasattr(function, SILENT):
            continue
        silent = _silenced(function, f"{module.__name__.partition('.')[0]}: {name}", run)
        setattr(owner, last, silent)
        script.update({name: silent for name, member in script.items() if member is function})


def _silenced(function: Any, label: str, run: ScriptRun) -> Any:
    @functools.wraps(function)
    def silent(*args: Any, **kwargs: Any) -> None:
        run.suppress(label)

    setattr(silent, SILENT, True)
    return silent


def lift_limit(run: ScriptRun) -> None:
    """Give the process memory again for its last records, after the last look at the gauge."""
    if run.limit_gauge is not None:
        run.read_limit_peak()
        run.limit_gauge = None
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
