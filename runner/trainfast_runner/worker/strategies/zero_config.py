"""DeepSpeed's JSON configuration for the zero* strategies, from the knobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..spec import Knobs

# DeepSpeed's default buckets hold 5e8 elements and are allocated whole, 2 GB in fp32, however small the model is.
LARGEST_BUCKET_ELEMENTS = 500_000_000
NEVER = 1_000_000_000


@dataclass(frozen=True)
class Zero:
    """What a strategy's name says: the ZeRO stage, and whether states leave the device."""

    stage: int
    offload: bool


ZERO = {
    "zero1": Zero(1, False),
    "zero2": Zero(2, False),
    "zero3": Zero(3, False),
    "zero2-offload": Zero(2, True),
    "zero3-offload": Zero(3, True),
}


def deepspeed_config(knobs: Knobs, ranks: int, parameters: int, device: str) -> dict[str, Any]:
    """The configuration `deepspeed.initialize` takes, for a model of `parameters` elements on a cpu or cuda device."""
    zero = ZERO[knobs.strategy]
    bucket = max(1, min(LARGEST_BUCKET_ELEMENTS, parameters))
    stage: dict[str, Any] = {"stage": zero.stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if zero.offload:
        stage["offload_optimizer"] = _place(knobs, device)
        if zero.stage == 3:
            stage["offload_param"] = _place(knobs, device)
    return {
        "train_batch_size": knobs.batch_size * knobs.grad_accum * ranks,
        "train_micro_batch_size_per_gpu": knobs.batch_size,
        "gradient_accumulation_steps": knobs.grad_accum,
        # Said even when it is 0: DeepSpeed clips at 1.0 by default.
        "gradient_clipping": knobs.grad_clip,
        "zero_optimization": stage,
        # Our optimizers are not all on DeepSpeed's list; those that lie about what they do are refused before launch.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": NEVER,
        "wall_clock_breakdown": False,
        **_precision(knobs.precision),
    }


def _place(knobs: Knobs, device: str) -> dict[str, Any]:
    """Where offloaded tensors go; page-locked memory only means something to a GPU."""
    if knobs.offload_path is None:
        return {"device": "cpu", "pin_memory": device == "cuda"}
    return {"device": "nvme", "nvme_path": knobs.offload_path, "pin_memory": device == "cuda"}


def _precision(name: str) -> dict[str, Any]:
    """Half-precision parameters with fp32 masters in the sharded optimizer; bf16-pure keeps no fp32 copy."""
    if name == "fp16":
        return {"fp16": {"enabled": True, "loss_scale": 0}}
    if name == "bf16":
        return {"bf16": {"enabled": True}}
    if name == "bf16-pure":
        return {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    return {}
