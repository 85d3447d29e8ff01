"""Ways to set a knob of a script that has no flag for it: fields of the Trainer, the frameworks' environment, defaults
of DataLoader. An explicit argument in the script wins over the last two, so what ran is read and compared."""

from __future__ import annotations

from collections.abc import Collection

from trainfast_runner.errors import UserError
from trainfast_runner.export.trainer_arguments import fields_of
from trainfast_runner.records.discovered import Discovered
from trainfast_runner.settings.knob_type import KnobValues

FRAMEWORK_KNOBS = (
    *("batch_size", "grad_accum", "precision", "checkpointing", "optimizer", "compile", "workers", "pin_memory"),
    *("prefetch", "lr", "lr_schedule", "weight_decay", "grad_clip", "seed"),
)
BY_LOADER = ("workers", "pin_memory")
BY_ENVIRONMENT = ("precision", "grad_accum", "grad_clip")
"""The knobs that need no hook in the script."""
LOADER = "DataLoader's defaults"
BY_FRAMEWORK: dict[str, dict[str, tuple[str, ...]]] = {
    "HF Trainer": {"the fields of TrainingArguments": FRAMEWORK_KNOBS},
    "accelerate": {"accelerate's environment": ("precision", "grad_accum"), LOADER: BY_LOADER},
    "Lightning": {"Lightning's environment": ("precision", "grad_accum", "grad_clip"), LOADER: BY_LOADER},
    "torch": {LOADER: BY_LOADER},
}
"""The knobs that reach a script without a flag, by the framework that trains and the way that they take."""
ACCELERATE_PRECISION = {"fp32": "no", "tf32": "no", "fp16": "fp16", "bf16": "bf16"}
LIGHTNING_PRECISION = {"fp32": "32-true", "fp16": "16-mixed", "bf16": "bf16-mixed", "bf16-pure": "bf16-true"}


def environment(knobs: KnobValues) -> dict[str, str]:
    """Variables by which accelerate and Lightning (PL_TRAINER_*) take these knobs."""
    env = {}
    precision = str(knobs.get("precision"))
    if precision in ACCELERATE_PRECISION:
        env["ACCELERATE_MIXED_PRECISION"] = ACCELERATE_PRECISION[precision]
    if precision in LIGHTNING_PRECISION:
        env["PL_TRAINER_PRECISION"] = LIGHTNING_PRECISION[precision]
    if "grad_accum" in knobs:
        env["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(knobs["grad_accum"])
        env["PL_TRAINER_ACCUMULATE_GRAD_BATCHES"] = str(knobs["grad_accum"])
    if "grad_clip" in knobs:
        env["PL_TRAINER_GRADIENT_CLIP_VAL"] = str(knobs["grad_clip"])
    return env


def trainer_fields(knobs: KnobValues) -> dict[str, object]:
    """Fields of TrainingArguments, which the hooks set before its `__post_init__`."""
    return fields_of({name: value for name, value in knobs.items() if name in FRAMEWORK_KNOBS})


def loader_defaults(knobs: KnobValues) -> dict[str, object]:
    """Defaults of DataLoader's arguments; `prefetch_factor` has none that suits a loader without workers."""
    found: dict[str, object] = {}
    if "workers" in knobs:
        found["num_workers"] = knobs["workers"]
    if "pin_memory" in knobs:
        found["pin_memory"] = knobs["pin_memory"] == "on"
    return found


def ways_without_flag(found: Discovered, mapped: Collection[str]) -> dict[str, list[str]]:
    """The knobs that reach a script though it has no flag for them, by the way that they take."""
    ways = BY_FRAMEWORK[found.framework or "torch"]
    left = {way: [name for name in names if name not in mapped] for way, names in ways.items()}
    return {way: names for way, names in left.items() if names}


def why_unreachable(name: str, framework: str, door_closed: str | None) -> str | None:
    """Why a knob without a flag cannot reach a script; None if it may. `framework` is empty where it is unknown."""
    if door_closed is not None and name not in BY_ENVIRONMENT:
        return door_closed
    taken = [one for names in BY_FRAMEWORK.get(framework, {}).values() for one in names]
    if framework and name not in taken:
        return f"without a flag {framework} takes only {', '.join(taken)}"
    return None


def check_reach(names: Collection[str], framework: str, door_closed: str | None) -> None:
    """Refuse knobs without a flag that cannot reach a script. Raises UserError naming the first and how to map it."""
    for name in names:
        if (why := why_unreachable(name, framework, door_closed)) is not None:
            raise UserError(
                f"{name} cannot reach the script: {why}",
                key=name,
                advice=f"presets new NAME --map {name}=--FLAG -- COMMAND",
            )
