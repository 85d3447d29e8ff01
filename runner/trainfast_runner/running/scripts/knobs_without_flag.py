"""Ways to set a knob of a script that has no flag for it: fields of the Trainer, the frameworks' environment, defaults
of DataLoader. An explicit argument in the script wins over the last two, so what ran is read and compared."""

from __future__ import annotations

from trainfast_runner.settings.knob_type import KnobValues
from trainfast_runner.settings.other_tools import loader_arguments, trainer_fields
from trainfast_runner.settings.precisions import ACCELERATE_NAMES, LIGHTNING_NAMES
from trainfast_runner.settings.scripts.script_reach import FRAMEWORK_KNOBS


def framework_environment(knobs: KnobValues) -> dict[str, str]:
    """Variables by which accelerate and Lightning (PL_TRAINER_*) take these knobs."""
    env = {}
    precision = str(knobs.get("precision"))
    if precision in ACCELERATE_NAMES:
        env["ACCELERATE_MIXED_PRECISION"] = ACCELERATE_NAMES[precision]
    if precision in LIGHTNING_NAMES:
        env["PL_TRAINER_PRECISION"] = LIGHTNING_NAMES[precision]
    if "grad_accum" in knobs:
        env["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(knobs["grad_accum"])
        env["PL_TRAINER_ACCUMULATE_GRAD_BATCHES"] = str(knobs["grad_accum"])
    if "grad_clip" in knobs:
        env["PL_TRAINER_GRADIENT_CLIP_VAL"] = str(knobs["grad_clip"])
    return env


def hook_trainer_fields(knobs: KnobValues) -> dict[str, object]:
    """Fields of TrainingArguments, which the hooks set before its `__post_init__`."""
    return trainer_fields({name: value for name, value in knobs.items() if name in FRAMEWORK_KNOBS})


def loader_defaults(knobs: KnobValues) -> dict[str, object]:
    """Defaults of DataLoader's arguments; `prefetch_factor` has none that suits a loader without workers."""
    return {name: value for name, value in loader_arguments(knobs).items() if name in ("num_workers", "pin_memory")}
