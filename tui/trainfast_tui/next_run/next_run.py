"""The run that `r` would start, and how it differs from the run on the screen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from trainfast_runner.errors import UserError
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.settings.knob_type import KnobValues
from trainfast_runner.settings.knob_values import KnobValue
from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_runner.settings.scripts.script_reach import LAUNCH_KNOBS
from trainfast_runner.settings.spec import RunSpec
from trainfast_tui.next_run.same_settings import asks_for_same, has_same_model
from trainfast_tui.text.overrides import typed_overrides

if TYPE_CHECKING:
    from trainfast_runner.machine.devices import Machine
    from trainfast_runner.search.advice.facts import Situation
    from trainfast_runner.settings.scripts.script_preset import ScriptPreset

LAUNCH_DEFAULTS = {name: KNOBS_BY_NAME[name].default for name in LAUNCH_KNOBS if name != "steps"}
"""Defaults of the knobs that are not the script's; without `steps` it runs to completion."""


@dataclass(frozen=True)
class NextRun(ABC):
    """Settings of the next run, with the knobs of its preset and of the run on the screen to compare with."""

    spec: RunSpec
    preset_knobs: KnobValues
    shown_run_knobs: KnobValues | None = None

    def __post_init__(self) -> None:
        """Drop the overrides that equal the preset: a knob that was turned back is none."""
        spec = self.spec
        turned_back = {
            name
            for name in spec.overrides
            if name in spec.knobs and spec.knobs[name] == _value_or_default(self.preset_knobs, name)
        }
        knobs = {name: value for name, value in spec.knobs.items() if name not in turned_back - set(self.preset_knobs)}
        overrides = tuple(name for name in spec.overrides if name not in turned_back)
        object.__setattr__(self, "spec", replace(spec, knobs=knobs, overrides=overrides))

    @property
    def script(self) -> ScriptPreset | None:
        """The user's own script; None for a model."""
        return self.spec.script

    @property
    def reference_knobs(self) -> KnobValues:
        """Knobs of the run on the screen, or without a run those of the preset."""
        return self.preset_knobs if self.shown_run_knobs is None else self.shown_run_knobs

    def compared_with(self, run_file: RunFile | None) -> Self:
        """Return a copy compared with this run, unless either runs a script and they do not run the same."""
        is_script_involved = run_file is not None and (run_file.script is not None or self.script is not None)
        if run_file is None or (is_script_involved and not has_same_model(run_file, self.spec)):
            return replace(self, shown_run_knobs=None)
        return replace(self, shown_run_knobs=run_file.knobs)

    def is_changed(self, name: str) -> bool:
        """True if the knob differs from `reference_knobs`."""
        return not asks_for_same(
            name, _value_or_default(self.reference_knobs, name), _value_or_default(self.spec.knobs, name)
        )

    def reference_spec(self) -> RunSpec | None:
        """Return the same model with `reference_knobs`; None if no knob differs from them."""
        reference = self.reference_knobs
        changed = {name: reference[name] for name in self.spec.knobs if name in reference and self.is_changed(name)}
        return replace(self.spec, knobs={**self.spec.knobs, **changed}) if changed else None

    def typed_field_overrides(self) -> list[str]:
        """Return the overrides of the preset's model and data fields, as they are typed."""
        sections = (("model", self.spec.model), ("data", self.spec.data))
        fields = {f"{section}.{name}": value for section, values in sections for name, value in values.items()}
        return typed_overrides({key: fields.get(key) for key in self.spec.overrides if "." in key})

    def repeats(self, run_file: RunFile) -> bool:
        """True if the next run has the model and knobs of `run_file`."""
        return has_same_model(run_file, self.spec) and all(
            asks_for_same(name, run_file.knobs.get(name), value) for name, value in self.spec.knobs.items()
        )

    def reset(self, name: str) -> Self:
        """Return a copy with the knob at its preset's value, or left to the script."""
        knobs = dict(self.spec.knobs)
        if name in self.preset_knobs:
            knobs[name] = self.preset_knobs[name]
        else:
            knobs.pop(name, None)
        overrides = tuple(override for override in self.spec.overrides if override != name)
        return replace(self, spec=replace(self.spec, knobs=knobs, overrides=overrides))

    def with_value_of(self, name: str, earlier: NextRun) -> Self:
        """Return a copy with the knob at its value in `earlier`."""
        if name in earlier.spec.overrides:
            return self.with_value(name, earlier.text_of(name))
        return self.reset(name)

    def ranks(self, machine: Machine | None) -> int | None:
        """Return the number of processes; None while the machine is unknown, if refused, or if a launcher sets it."""
        try:
            return None if machine is None else self._ranks(machine)
        except UserError:
            return None

    @abstractmethod
    def _ranks(self, machine: Machine) -> int | None: ...

    @abstractmethod
    def text_of(self, name: str) -> str:
        """Return the value of a knob as it is typed."""

    @abstractmethod
    def headings(self, names: Iterable[str]) -> dict[str, str]:
        """Return the heading of each listed knob by name, in list order.

        A model lists the knobs of `names` that matter to it, a script all knobs.
        """

    @abstractmethod
    def matters(self, name: str) -> bool:
        """True if turning the knob changes anything."""

    def refused_values(self, name: str, machine: Machine | None) -> dict[KnobValue, str]:
        """Return the values of a knob that cannot work on the devices of the run, each with the reason.

        Empty while the machine is unknown.
        """
        if machine is None:
            return {}
        from trainfast_runner.settings.compatibility.check import refused_values

        return refused_values(name, self.spec, machine)

    @abstractmethod
    def turn(self, name: str, by: int, *, around: bool = False, skipped: Container[KnobValue] = ()) -> Self:
        """Turn the knob `by` stops along its values without `skipped`; `around` goes on at the other end.

        Raises UserError.
        """

    @abstractmethod
    def with_value(self, name: str, text: str) -> Self:
        """Return a copy with a typed value of the knob. Raises UserError."""

    @abstractmethod
    def save(self, name: str) -> Path:
        """Save the knobs as a preset of the user's own, in place of a preset of that name, and return the file.

        Raises UserError.
        """

    def advice(self, machine: Machine | None, situation: Situation | None) -> dict[str, str]:
        """Return the advisor's texts by the name of the knob that each stands beside.

        Empty while the machine is unknown, and for a script.
        """
        return {}

    def global_batch(self, machine: Machine | None) -> tuple[int, int] | None:
        """Return the samples of one optimizer step and the data-parallel ranks that share them.

        None while the machine is unknown, if the devices are refused, and for a script.
        """
        return None


def _value_or_default(knobs: KnobValues, name: str) -> KnobValue:
    return knobs.get(name, LAUNCH_DEFAULTS.get(name))
