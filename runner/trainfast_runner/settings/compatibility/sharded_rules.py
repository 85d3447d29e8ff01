"""What the strategies that shard, slice or spread a model need of the other knobs, the devices and the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainfast_runner.errors import UserError
from trainfast_runner.machine.cpu.device_names import CPU, asks_for_cpu, cpu_processes
from trainfast_runner.settings.compatibility.facts import Facts
from trainfast_runner.settings.knob_type import Knobs
from trainfast_runner.settings.world import TENSOR_PARALLEL

SHARDED = ("fsdp", *TENSOR_PARALLEL)
OUR_PLANS = ("bert", "gpt2")
"""Families without a plan of transformers' own, for which the worker's `tensor_plan.py` has one."""
STYLES = {
    "colwise",
    "rowwise",
    "packed_colwise",
    "moe_tp_experts",
    "replicated_with_grad_allreduce",
    "colwise_gather_output",
    "colwise_rep",
}
"""What the worker knows how to cut."""
HEADS = ("num_attention_heads", "n_head", "num_key_value_heads")
WIDTHS = ("intermediate_size", "n_inner")
FLAT_OPTIMIZERS = ("adamw", "adamw-loop", "adamw-foreach", "adamw-fused", "sgd")


def mesh_asked(knobs: Knobs, devices: int) -> dict[str, int] | None:
    """The device mesh of these strategies on that many devices; None for the others."""
    strategy, degree = knobs.get("strategy"), int(str(knobs.get("tp_degree") or 1))
    if strategy in ("dp", "fsdp"):
        return {"dp": devices}
    if strategy == "naive-mp":
        return {"mp": devices}
    if strategy == "tp":
        return {"tp": degree}
    return {"dp": devices // degree, "tp": degree} if strategy in TENSOR_PARALLEL else None


def several_gpus(facts: Facts) -> UserError | None:
    """One process over several devices needs GPUs."""
    strategy = facts.knobs["strategy"]
    if strategy not in ("dp", "naive-mp"):
        return None
    what = "copies the model to each" if strategy == "dp" else "puts layers on each"
    devices = facts.knobs["devices"]
    if asks_for_cpu(devices):
        on_cpu = devices if (cpu_processes(devices) or 0) > 1 else f"{CPU}:2"
        return UserError(
            f"strategy={strategy} {what} of two or more GPUs from one process, and devices={devices} asks for the CPU",
            key="strategy",
            advice=f"strategy={'ddp' if strategy == 'dp' else 'pp'} with devices={on_cpu}",
        )
    if facts.machine.device != "cuda":
        return UserError(
            f"strategy={strategy} {what} of two or more GPUs from one process, and a run here has none"
            f" ({facts.machine.why_no_gpu})",
            key="strategy",
            advice="strategy=ddp" if strategy == "dp" else "strategy=pp",
        )
    if facts.devices < 2:
        return UserError(
            f"strategy={strategy} {what} of two or more GPUs, and devices={facts.knobs['devices'] or 'auto'} is one",
            key="devices",
            advice="devices=2 where there are two, or strategy=single",
        )
    return None


def optimizer_takes_slices(facts: Facts) -> UserError | None:
    """The optimizer works on a rank's slice of each parameter, where that is all it has."""
    strategy, optimizer = facts.knobs["strategy"], facts.knobs["optimizer"]
    if strategy not in SHARDED or optimizer in FLAT_OPTIMIZERS:
        return None
    why = "reads whole matrices" if optimizer == "adafactor" else "quantizes plain tensors"
    return UserError(
        f"optimizer={optimizer} {why}, and with strategy={strategy} a rank has slices (DTensors)",
        key="optimizer",
        allowed=FLAT_OPTIMIZERS,
        advice=f"optimizer=adamw-fused, or strategy=ddp with optimizer={optimizer}",
    )


def _family_has_a_plan(facts: Facts) -> UserError | None:
    strategy, family = facts.knobs["strategy"], facts.config.get("model_type")
    if strategy not in TENSOR_PARALLEL or not isinstance(family, str) or family in OUR_PLANS:
        return None
    plan: Any = facts.config.get("base_model_tp_plan")
    instead = "strategy=fsdp" if strategy == "tp" else f"strategy={str(strategy).removesuffix('+tp')}"
    if not plan:
        return UserError(
            f"strategy={strategy} has no plan for {family}: transformers ships none (it does for llama, mistral,"
            f" mixtral, qwen3, gemma3_text, gpt_neox), and ours are for {' and '.join(OUR_PLANS)}",
            key="strategy",
            advice=instead,
        )
    unknown = sorted(set(plan.values()) - STYLES)
    if unknown:
        return UserError(
            f"strategy={strategy}: the plan of {family} cuts layers as {', '.join(unknown)}, which is not done here",
            key="strategy",
            advice=instead,
        )
    return None


def _degree_divides_the_model(facts: Facts) -> UserError | None:
    if facts.knobs["strategy"] not in TENSOR_PARALLEL:
        return None
    degree = int(str(facts.knobs["tp_degree"]))
    for field in (*HEADS, *WIDTHS):
        size = facts.config.get(field)
        if isinstance(size, int) and size % degree:
            working = [count for count in range(2, degree) if size % count == 0]
            what = "key-value heads" if "key_value" in field else "heads" if field in HEADS else "columns of its MLP"
            return UserError(
                f"tp_degree={degree} does not divide the model's {size} {what} (model.{field})",
                key="tp_degree",
                advice=f"tp_degree={working[-1]}" if working else "strategy=fsdp",
            )
    return None


def devices_fill_the_mesh(facts: Facts) -> UserError | None:
    """As many devices as the tensor-parallel degree wants, or several times as many."""
    strategy = facts.knobs["strategy"]
    if strategy not in TENSOR_PARALLEL:
        return None
    degree, devices = int(str(facts.knobs["tp_degree"])), facts.devices
    if strategy == "tp" and devices != degree:
        return UserError(
            f"strategy=tp with tp_degree={degree} runs on {degree} devices, not on devices={devices}",
            key="devices",
            advice=f"devices={degree}" + (f", or tp_degree={devices}" if devices > 1 else ""),
        )
    if strategy != "tp" and (devices % degree or devices == degree):
        return UserError(
            f"strategy={strategy} with tp_degree={degree} needs two or more groups of {degree} devices,"
            f" and devices={devices} are not",
            key="devices",
            advice=f"devices={2 * degree}, or strategy=tp with devices={degree}",
        )
    return None


SHARDED_RULES: tuple[Callable[[Facts], UserError | None], ...] = (
    several_gpus,
    optimizer_takes_slices,
    _family_has_a_plan,
    _degree_divides_the_model,
    devices_fill_the_mesh,
)
