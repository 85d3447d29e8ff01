"""The facts that advice rests on (model, machine, runs measured before), and the advice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from trainfast_runner.errors import UserError
from trainfast_runner.machine.devices import Machine
from trainfast_runner.machine.interconnect import Interconnect
from trainfast_runner.memory.model_size import ModelSize
from trainfast_runner.settings.device_counts import device_count, global_batch
from trainfast_runner.settings.knob_type import KnobValues
from trainfast_runner.settings.spec import RunSpec

SAME_MEMORY = ("precision", "seq_len", "checkpointing", "optimizer", "attention")
"""Knobs that must be equal for two runs to need the same memory a sample."""


@dataclass(frozen=True)
class EndedRun:
    """One ended run of the same preset, model and data in this home, with any knobs.

    `samples_per_s` is summed over data-parallel ranks; None if unknown, or if the speed must not rank.
    """

    run_id: str
    knobs: Mapping[str, object]
    state: str
    samples_per_s: float | None


@dataclass(frozen=True)
class Situation:
    """Facts about model and machine that advice needs besides the knobs; None if unknown."""

    size: ModelSize | None = None
    shapes: Mapping[str, int] | None = None
    """Hidden and vocabulary size under the names the configuration gives them."""
    links: Interconnect | None = None
    measured: tuple[EndedRun, ...] = ()
    model_refusal: str | None = None
    """The reason that the model cannot be trained."""


@dataclass(frozen=True)
class Advice:
    """One paragraph about a knob, and the advised value as typed; None for advice without a value."""

    knob: str
    text: str
    value: str | None = None


def global_batch_or_none(spec: RunSpec, knobs: KnobValues, machine: Machine) -> int | None:
    """Return the global batch with these knobs; None if there are too few devices."""
    try:
        return global_batch(knobs, device_count(replace(spec, knobs=knobs), machine))
    except UserError:
        return None


def has_same(run: EndedRun, spec: RunSpec, names: tuple[str, ...]) -> bool:
    """True if a measured run had this run's values of some knobs; a knob that its record lacks counts as equal."""
    return all(run.knobs.get(name, spec.knobs[name]) == spec.knobs[name] for name in names)
