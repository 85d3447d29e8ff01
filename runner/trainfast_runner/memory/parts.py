"""The two parts of a memory model, each remembered by what it depends on.

The course of forward and backward does not change with the optimizer, nor its update with the sequence, the attention
or the checkpointing: turning one knob traces one part.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from trainfast_runner.machine import training_python
from trainfast_runner.memory.pipeline import Pipeline, stage_count
from trainfast_runner.memory.timeline import Stack, Stretch
from trainfast_runner.records.home import cache_directory
from trainfast_runner.records.json_lines import write_atomically
from trainfast_runner.settings.spec import RunSpec
from trainfast_runner.worker.catalog import STRATEGIES

COURSE_KNOBS = ("precision", "seq_len", "checkpointing", "attention")
"""The knobs that decide what is alive in forward and backward; all but the optimizer's, which decides what is alive in
its step, only say how often, how many and on which rank."""
FORMAT = "4"
"""Of what is remembered; a trace of another format is made again."""


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """Forward and backward of a model, and its division into blocks and stages.

    `unused` are the names of the parameters that get no gradient, and so no optimizer state. `library_bytes` are a
    GPU's libraries' own, in torch's allocator.
    """

    parameter_sizes: list[int]
    stacks: list[Stack]
    stretches: list[Stretch]
    pipeline: Pipeline | None
    unused: list[str]
    library_bytes: int = 0
    attention: str = ""
    """The model's kernel, and why `attention=auto` took it."""


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """Live bytes by category of the whole model before the optimizer's second step and at that step's peak."""

    before_optimizer: list[float]
    optimizer_peak: list[float]


Part = TypeVar("Part", Course, Update)


@dataclass(frozen=True)
class Asked:
    """What the tracer is asked for, as JSON, and where its answer is remembered."""

    request: str
    file: Path


@dataclass(frozen=True)
class Parts:
    """Both parts of one model."""

    course: Asked
    update: Asked

    @property
    def name(self) -> str:
        """Of the model they are parts of."""
        return f"{self.course.file.stem}-{self.update.file.stem}"


def parts_of(spec: RunSpec, device: str, executable: str, whole: bool = False, there: list[str] | None = None) -> Parts:
    """What a run's model is made of on `device`, cpu or cuda; `whole` traces every block.

    `there` is `training_python.installed(executable)`, where the caller has looked already.
    """
    course, update = requests_of(spec, device, whole)
    return Parts(_asked(course, executable, there), _asked(update, executable, there))


def requests_of(spec: RunSpec, device: str, whole: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the tracer is asked for the course and for the update: all that they depend on."""
    strategy, precision = STRATEGIES[str(spec.knobs["strategy"])], str(spec.knobs["precision"])
    if precision == "tf32":
        # Other kernels, the same tensors.
        precision = "fp32"
    if strategy.zero and precision in ("fp16", "bf16"):
        # DeepSpeed trains a model whose weights are half; it does not cast them as autocast does.
        precision = "bf16-pure"
    about: dict[str, Any] = {"model": spec.model, "objective": spec.data["objective"], "device": device}
    if whole:
        about["whole"] = True
    # A slice of a model has other shapes.
    if strategy.tensor:
        about["tp_degree"] = spec.knobs["tp_degree"]
    course = {**about, "part": "course", "knobs": {name: spec.knobs[name] for name in COURSE_KNOBS}}
    course["knobs"]["precision"] = precision
    # The step is the whole model's; where the worker cuts it depends on how often.
    if strategy.pipeline:
        course["stages"] = stage_count(spec.knobs)
    elif "mp" in strategy.axes and spec.knobs["devices"] is not None:
        course |= {"stages": stage_count(spec.knobs), "spread": True}
    knobs = {
        "optimizer": spec.knobs["optimizer"],
        # Under autocast the weights, and so their states, are fp32; fp16 scales the loss besides.
        "precision": "fp32" if precision == "bf16" else precision,
        # Every model has it, and it has no parameters.
        "attention": "eager",
    }
    return course, {**about, "part": "update", "knobs": knobs}


def _asked(request: dict[str, Any], executable: str, there: list[str] | None) -> Asked:
    text = json.dumps(request, sort_keys=True)
    name = training_python.stamp(executable, text, FORMAT, there)
    return Asked(text, cache_directory() / "traced" / f"{name}.json")


def remembered(asked: Asked, kind: type[Part]) -> Part | None:
    """The part of an earlier trace; a damaged one is none."""
    try:
        return msgspec.json.decode(asked.file.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None


def remember(asked: Asked, part: Course | Update) -> None:
    """Keep it. Raises OSError, after which every launch traces again, which costs seconds and nothing else."""
    asked.file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(asked.file, msgspec.json.encode(part))
