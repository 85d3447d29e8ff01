"""The way of each knob into a script of the user's own, as far as it is known before the run.

A knob without a flag may reach a script by a framework: the fields of the Trainer, the environment of accelerate and
Lightning, defaults of DataLoader. An explicit argument in the script wins over the last two.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.settings.knob_values import KnobValue, KnobValues
from trainfast_runner.settings.knobs import knob
from trainfast_runner.settings.precisions import ACCELERATE_NAMES, LIGHTNING_NAMES, TRAINER_PRECISIONS
from trainfast_runner.settings.script_preset import TRAINER_OPTIMIZERS, ScriptPreset, flag_words_text
from trainfast_runner.worker.catalog import ALLOCATOR_VARIABLES, LEVERS, LEVERS_TAKEN

TRAINER_KNOBS = (
    *("batch_size", "grad_accum", "precision", *LEVERS_TAKEN, "optimizer", "samples", "workers", "pin_memory"),
    *("prefetch", "lr", "lr_schedule", "weight_decay", "grad_clip", "seed"),
)
BY_ALLOCATOR = tuple(name for name, entry in LEVERS.items() if any(value.allocator_setting for value in entry.values))
FRAMEWORK_KNOBS = (*TRAINER_KNOBS, *BY_ALLOCATOR)
BY_LOADER = ("workers", "pin_memory")
BY_ENVIRONMENT: dict[str, tuple[str, ...]] = {
    "HF Trainer": BY_ALLOCATOR,
    "accelerate": ("precision", "grad_accum", "compile", *BY_ALLOCATOR),
    "Lightning": ("precision", "grad_accum", "grad_clip", *BY_ALLOCATOR),
    "torch": BY_ALLOCATOR,
}
"""The knobs that a framework, or torch below it, takes by variables of the environment: no hook has to set them."""
ALLOCATOR, LOADER_DEFAULTS = " or ".join(ALLOCATOR_VARIABLES), "DataLoader's defaults"
BY_FRAMEWORK: dict[str, dict[str, tuple[str, ...]]] = {
    "HF Trainer": {"the fields of TrainingArguments": TRAINER_KNOBS, ALLOCATOR: BY_ALLOCATOR},
    "accelerate": {"accelerate's environment": BY_ENVIRONMENT["accelerate"], LOADER_DEFAULTS: BY_LOADER},
    "Lightning": {"Lightning's environment": BY_ENVIRONMENT["Lightning"], LOADER_DEFAULTS: BY_LOADER},
    "torch": {LOADER_DEFAULTS: BY_LOADER, ALLOCATOR: BY_ALLOCATOR},
}
"""The knobs that reach a script without a flag, by the framework that trains and the way that they take."""
VALUES_TAKEN: dict[str, dict[str, tuple[str, ...]]] = {
    "HF Trainer": {
        "precision": TRAINER_PRECISIONS,
        "optimizer": tuple(TRAINER_OPTIMIZERS),
        "samples": ("padded", "grouped"),
        **LEVERS_TAKEN,
    },
    "accelerate": {"precision": tuple(ACCELERATE_NAMES)},
    "Lightning": {"precision": tuple(LIGHTNING_NAMES)},
}
"""The only values of these knobs that reach a script without a flag, by the framework."""
LAUNCH_KNOBS = {
    "steps": "ends the script after so many steps; without it the script runs to completion",
    "timing_warmup": "first steps that enter no figure",
    "devices": "by CUDA_VISIBLE_DEVICES",
    "watch": "the supervisor samples these devices",
    "memory_limit": "for the trials of a search alone: a run refuses it",
}
"""The knobs that need no place in a script, and how the launch, the supervisor or the hooks apply each."""


class Way(StrEnum):
    """A way into a script; the value is its heading on the screen."""

    FLAG = "by a flag"
    LAUNCH = "by the launch"
    FRAMEWORK = "without a flag"
    NONE = "cannot reach the script"


class Reach(msgspec.Struct, frozen=True):
    """The way that a knob takes into a script, and the reason as text."""

    way: Way
    text: str

    def __str__(self) -> str:
        # A flag says itself what it is, and has no room beside it on a narrow screen.
        return self.text if self.way is Way.FLAG else f"{self.way}: {self.text}"


def reach_of(name: str, preset: ScriptPreset) -> Reach:
    """The way of this knob into the preset's script."""
    if name in preset.flag_words:
        return Reach(Way.FLAG, flag_words_text(preset.flag_words[name]))
    if name in LAUNCH_KNOBS:
        return Reach(Way.LAUNCH, LAUNCH_KNOBS[name])
    if name not in FRAMEWORK_KNOBS:
        return Reach(Way.NONE, "no flag is mapped to it")
    if (reason := unreachable_reason(name, preset.framework, None)) is not None:
        return Reach(Way.NONE, reason)
    ways = [way for way, names in BY_FRAMEWORK.get(preset.framework, {}).items() if name in names]
    unknown = "only if a Trainer, accelerate or Lightning takes it; the script showed none before its arguments"
    return Reach(Way.FRAMEWORK, f"by {ways[0]}" if ways else unknown)


def has_flag(name: str, value: KnobValue, preset: ScriptPreset) -> bool:
    """True if the knob gets this value by a flag: not one without words that a field of its framework takes."""
    words, by_field = preset.flag_words.get(name), VALUES_TAKEN.get(preset.framework, {}).get(name, ())
    return words is not None and (isinstance(words, str) or knob(name).text_of(value) in words or value not in by_field)


def values_taken(name: str, preset: ScriptPreset) -> tuple[str, ...] | None:
    """Return the values, as text, that reach the script; None if the knob has no others."""
    words, by_field = preset.flag_words.get(name), VALUES_TAKEN.get(preset.framework, {}).get(name)
    return (*words, *(by_field or ())) if isinstance(words, dict) else None if words else by_field


def ways_without_flag(framework: str, mapped: Collection[str]) -> dict[str, list[str]]:
    """The knobs that reach a script though it has no flag for them, by the way that they take.

    A script whose framework is unknown is taken for one of torch alone.
    """
    ways = BY_FRAMEWORK[framework or "torch"]
    missing_flags = {way: [name for name in names if name not in mapped] for way, names in ways.items()}
    return {way: names for way, names in missing_flags.items() if names}


def unreachable_reason(name: str, framework: str, hooks_blocked: str | None) -> str | None:
    """Return the reason that a knob without a flag cannot reach a script; None if it may.

    `framework` is empty if it is unknown.
    """
    every_variable = [knob for names in BY_ENVIRONMENT.values() for knob in names]
    by_variable = BY_ENVIRONMENT.get(framework, ()) if framework else every_variable
    if hooks_blocked is not None and name not in by_variable:
        return hooks_blocked
    reachable = [name for names in BY_FRAMEWORK.get(framework, {}).values() for name in names]
    if framework and name not in reachable:
        return f"without a flag {framework} takes only {', '.join(reachable)}"
    return None


def check_reach(knobs: KnobValues, framework: str, hooks_blocked: str | None) -> None:
    """Refuse knobs without a flag that cannot reach a script, and values that its framework lacks.

    Raises UserError naming the first and how to map it.
    """
    for name, value in knobs.items():
        reason = unreachable_reason(name, framework, hooks_blocked)
        taken = VALUES_TAKEN.get(framework, {}).get(name, ())
        if reason is None and taken and value not in (None, *taken):
            reason = f"without a flag {framework} takes only {name} {', '.join(taken)}, not {value}"
        if reason is not None:
            message, advice = f"{name} cannot reach the script: {reason}", f"a flag for {name}"
            option = f"presets new NAME --map {name}=--FLAG -- COMMAND"
            raise UserError(message, key=name, advice=advice, option=option)
