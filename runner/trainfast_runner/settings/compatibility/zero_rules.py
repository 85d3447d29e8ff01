"""Needs of DeepSpeed: fp16 instructions on a CPU, GPUs with an index, and a directory that takes offloaded states.

`refuse_small_disk` is not a rule: it needs the number of parameters, which is known later than the facts.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from trainfast_runner.errors import UserError
from trainfast_runner.machine.cpu.cpu_info import cpu_has_fp16
from trainfast_runner.machine.extensions import has_libaio, missing_tool
from trainfast_runner.machine.gpus.visible import VISIBLE_DEVICES
from trainfast_runner.machine.process_list import user_name
from trainfast_runner.records.tick import is_instance
from trainfast_runner.settings.compatibility.facts import Facts, Rule
from trainfast_runner.settings.device_counts import chosen_gpus
from trainfast_runner.settings.knob_type import KnobValues
from trainfast_runner.settings.precisions import PRECISIONS
from trainfast_runner.settings.strategy_of_run import offload_folder
from trainfast_runner.units import mebibytes
from trainfast_runner.worker.catalog import OPTIMIZERS, strategies_obeying
from trainfast_runner.worker.shared.offload_scratch import DISK_FULL_BELOW_BYTES, free_bytes


def _half_precision_on_a_cpu(facts: Facts) -> None:
    """Refuse fp16 with DeepSpeed on a CPU without fp16 instructions, as DeepSpeed itself does."""
    is_fp16_on_cpu = facts.knobs["precision"] == "fp16" and facts.machine.device == "cpu"
    if facts.strategy.is_zero and is_fp16_on_cpu and not cpu_has_fp16():
        raise UserError(
            f"precision=fp16 with strategy={facts.strategy.name} needs a CPU with AVX512-FP16, and this one has none",
            key="precision",
            advice="precision=bf16",
        )


def gpu_has_an_index(facts: Facts) -> None:
    """Refuse a MIG instance where DeepSpeed looks up the GPU by its index."""
    if facts.machine.device != "cuda" or not facts.strategy.needs_gpu_index:
        return
    for gpu in chosen_gpus(facts.knobs, facts.machine).gpus:
        if is_instance(gpu.uuid):
            advice = "zero3-offload" if facts.strategy.offloads else "zero3"
            raise UserError(
                f"strategy={facts.strategy.name} needs a GPU with an index, and devices={facts.knobs['devices'] or 1}"
                f" is the MIG instance {gpu.uuid} of {VISIBLE_DEVICES}",
                key="strategy",
                advice=f"strategy={advice}",
            )


def _offload_path_takes_files(facts: Facts) -> None:
    """Refuse an `offload_path` that takes no files, without ZeRO-3, or where DeepSpeed's extension cannot be built."""
    path, strategy = facts.knobs["offload_path"], facts.knobs["strategy"]
    if path is None or not facts.strategy.is_zero:
        return
    if "offload_path" not in facts.strategy.knobs:
        raise UserError(
            f"offload_path={path} does nothing with strategy={strategy}: DeepSpeed offloads to a disk in ZeRO-3 only",
            key="offload_path",
            advice=f"strategy={' or '.join(strategies_obeying('offload_path'))}, or leaving offload_path out",
        )
    folder = Path(os.path.expanduser(str(path)))
    if not folder.is_dir():
        is_file = folder.exists()
        raise UserError(
            f"offload_path={path} {'is a file' if is_file else 'does not exist'}; strategy={strategy} needs a directory"
            " to put states in",
            key="offload_path",
            advice=f"offload_path={folder.parent}" if is_file else f"mkdir -p {path}",
        )
    if (reason := _closed_to_us(folder)) is not None:
        raise UserError(
            f"offload_path={path} {reason}, and strategy={strategy} writes there",
            key="offload_path",
            advice="a directory of your own on the NVMe disk",
        )
    if (available_bytes := free_bytes(folder)) < DISK_FULL_BELOW_BYTES:
        raise UserError(
            f"offload_path={path} is full: {mebibytes(available_bytes)} free",
            key="offload_path",
            advice="a directory on a disk with free space",
        )
    missing = missing_tool(facts.python)
    if missing is None and not has_libaio(facts.python):
        missing = "libaio with its header", "apt-get install libaio-dev"
    if missing is not None:
        tool, command = missing
        raise UserError(
            f"offload_path={path} needs DeepSpeed's async_io extension, which builds with {tool}; install with:"
            f" {command}",
            key="offload_path",
            advice="leaving offload_path out: the states stay in host memory",
        )


def refuse_small_disk(knobs: KnobValues, parameters: int | None) -> None:
    """Raise UserError for an `offload_path` without space for weights and states; return when the size is unknown.

    The weights in the states' precision and the optimizer's states: with AdamW in fp32 12 bytes a parameter. A real
    run of 3,344,064 parameters wrote 14.
    """
    folder = offload_folder(knobs)
    if folder is None or parameters is None:
        return
    width = PRECISIONS[str(knobs["precision"])].weight_bytes
    needed_bytes = parameters * width * (1 + OPTIMIZERS[str(knobs["optimizer"])].state_tensors)
    available_bytes = free_bytes(folder)
    if available_bytes < needed_bytes:
        raise UserError(
            f"offload_path={knobs['offload_path']} has {mebibytes(available_bytes)} free;"
            f" the states of {parameters:,} parameters take {mebibytes(needed_bytes)}",
            key="offload_path",
            advice="a directory on a disk with free space",
        )


def _closed_to_us(folder: Path) -> str | None:
    """Reason to refuse `folder`; None for a directory that is this user's, or shared with them."""
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return "cannot be written"
    status = folder.stat()
    # Root passes `os.access` everywhere, so the owner is checked too.
    if status.st_uid != os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"belongs to user {user_name(status.st_uid)}"
    return None


ZERO_RULES: tuple[Rule, ...] = (_half_precision_on_a_cpu, _offload_path_takes_files)
