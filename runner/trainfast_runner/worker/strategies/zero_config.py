"""DeepSpeed's JSON configuration for the zero* strategies, from the knobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..catalog import STRATEGIES
from ..model.weights import parts
from ..spec import Knobs

LARGEST_BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's default, in which a bucket is allocated whole for any model: 2 GB in fp32."""
MAX_LIVE_ELEMENTS = 1_000_000_000
"""DeepSpeed's own bound on the elements that ZeRO-3 keeps gathered."""
ALIGNED_ELEMENTS = 65_536
"""The size of a buffer is a multiple of this, for the alignment of the disk."""
NEVER_PRINT_STEPS = 1_000_000_000
"""More steps than a run takes, so that DeepSpeed prints no progress."""


@dataclass(frozen=True)
class Sizes:
    """Elements of a model's parameters: of all, of the largest one, and of the largest part (`weights.Part`)."""

    total: int
    parameter: int
    part: int


def unpartitioned_sizes(model: nn.Module) -> Sizes:
    """Sizes of a model that is not partitioned yet."""
    sizes_by_part = [
        {id(parameter): parameter.numel() for module in part.modules for parameter in module.parameters(recurse=False)}
        for part in parts(model)
    ]
    whole = {key: size for sizes in sizes_by_part for key, size in sizes.items()}
    return Sizes(sum(whole.values()), max(whole.values()), max(sum(sizes.values()) for sizes in sizes_by_part))


def deepspeed_config(knobs: Knobs, dp_degree: int, sizes: Sizes, device: str, disk: str | None) -> dict[str, Any]:
    """Make the configuration for `deepspeed.initialize`.

    `device` is cpu or cuda, `disk` the directory for offloaded states; None for host memory.
    """
    entry = STRATEGIES[knobs.strategy]
    bucket = min(LARGEST_BUCKET_ELEMENTS, sizes.part if entry.zero_stage == 3 else sizes.total)
    stage: dict[str, Any] = {"stage": entry.zero_stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if entry.zero_stage == 3:
        # With DeepSpeed's own bounds a model of less than 1e9 parameters stays gathered.
        stage["stage3_max_live_parameters"] = min(MAX_LIVE_ELEMENTS, 2 * sizes.part)
        stage["stage3_max_reuse_distance"] = min(MAX_LIVE_ELEMENTS, sizes.part)
        stage["sub_group_size"] = min(MAX_LIVE_ELEMENTS, sizes.part)
    if entry.offloads:
        # Only a GPU uses page-locked memory.
        offload = {"device": "cpu" if disk is None else "nvme", "pin_memory": device == "cuda"}
        if disk is not None:
            offload["nvme_path"] = disk
        stage["offload_optimizer"] = offload
        if entry.zero_stage == 3 and disk is not None and device == "cuda":
            stage["offload_param"] = {**offload, "buffer_size": _buffer(sizes.parameter, dp_degree)}
        elif entry.zero_stage == 3:
            # DeepSpeed 0.19 writes fp32 parameters to a disk as bf16 on a CPU that has no fp16.
            stage["offload_param"] = {"device": "cpu", "pin_memory": device == "cuda"}
    return {
        "train_batch_size": knobs.batch_size * knobs.grad_accum * dp_degree,
        "train_micro_batch_size_per_gpu": knobs.batch_size,
        "gradient_accumulation_steps": knobs.grad_accum,
        # Explicit even when it is 0: DeepSpeed clips at 1.0 by default.
        "gradient_clipping": knobs.grad_clip,
        "zero_optimization": stage,
        # Some of our optimizers are not on DeepSpeed's list; those that would not work are refused before launch.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": NEVER_PRINT_STEPS,
        "wall_clock_breakdown": False,
        **_precision(knobs.precision),
    }


def _buffer(largest: int, dp_degree: int) -> int:
    """Elements of one of five buffers: a rank's share of the largest parameter, with room for the disk's alignment."""
    share = -(-largest // dp_degree)
    return (share // ALIGNED_ELEMENTS + 1) * ALIGNED_ELEMENTS


def _precision(name: str) -> dict[str, Any]:
    """Half-precision parameters with fp32 masters in the sharded optimizer; bf16-pure keeps no fp32 copy."""
    if name == "fp16":
        return {"fp16": {"enabled": True, "loss_scale": 0}}
    if name == "bf16":
        return {"bf16": {"enabled": True}}
    if name == "bf16-pure":
        return {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    return {}
