"""A run's knobs as fields of transformers' TrainingArguments, and the knobs that have none."""

from __future__ import annotations

from trainfast_runner.records.run_file import RunFile
from trainfast_runner.settings.knob_type import Knobs
from trainfast_runner.settings.knob_values import KnobValue
from trainfast_runner.settings.knobs import BY_NAME, KNOBS, defaults

OPTIM = {
    "adamw": "adamw_torch",
    "adamw-loop": "adamw_torch",
    "adamw-foreach": "adamw_torch",
    "adamw-fused": "adamw_torch_fused",
    "adamw-8bit": "adamw_bnb_8bit",
    "paged-adamw-8bit": "paged_adamw_8bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
}
"""`optimizer` in the names of transformers' `OptimizerNames`."""


def trainer_arguments(run: RunFile, knobs: Knobs) -> tuple[dict[str, object], list[str]]:
    """Every field that a knob decides, by name, and the turned knobs that no field says."""
    said: dict[str, object] = {}
    for entry in KNOBS:
        name, value = entry.same_as.training_args, knobs[entry.name]
        if entry.name == "precision":
            said |= _trainer_precision(str(value))
        elif entry.name == "optimizer":
            said[name] = OPTIM[str(value)]
        elif entry.name == "compile":
            said |= {} if value == "off" else {"torch_compile": True, "torch_compile_mode": _compile_mode(knobs)}
        elif entry.name == "prefetch":
            said |= {name: value} if knobs["workers"] else {}
        elif name.isidentifier() and name.islower():
            said[name] = _plain(value)
    if str(knobs["strategy"]).startswith("zero"):
        said["deepspeed"] = "deepspeed.json"
    if run.device == "cpu":
        said["use_cpu"] = True
    strategy = str(knobs["strategy"])
    left_out = _without(knobs, "training_args")
    if strategy not in ("single", "dp", "ddp") and not strategy.startswith("zero"):
        left_out.append("strategy")
    # The Trainer has no name for these two loops, and no precision without fp32 weights.
    left_out += ["optimizer"] if knobs["optimizer"] in ("adamw-loop", "adamw-foreach") else []
    left_out += ["precision"] if knobs["precision"] == "bf16-pure" else []
    return said, left_out


def turned(knobs: Knobs) -> list[str]:
    """The knobs that are not at their defaults, those about our own run and its timing left out."""
    usual = defaults()
    return [
        name
        for name, value in knobs.items()
        if value != usual[name] and name not in ("timing_warmup", "watch", "engine") and BY_NAME[name].applies(knobs)
    ]


def _compile_mode(knobs: Knobs) -> str:
    """torch.compile's mode: no gradient can be accumulated in the memory of a CUDA graph, which is replayed."""
    replayed = knobs["compile"] == "max-autotune" and knobs["grad_accum"] != 1
    return "max-autotune-no-cudagraphs" if replayed else str(knobs["compile"])


def _trainer_precision(precision: str) -> dict[str, object]:
    return {
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        **({"tf32": True} if precision == "tf32" else {}),
    }


def _without(knobs: Knobs, where: str) -> list[str]:
    return [name for name in turned(knobs) if not getattr(BY_NAME[name].same_as, where)]


def _plain(value: KnobValue) -> object:
    """Switches as booleans; full checkpointing is the Trainer's `True`."""
    return {"on": True, "off": False, "full": True}.get(value, value) if isinstance(value, str) else value
