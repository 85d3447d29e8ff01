"""The run that `r` would start, and how it differs from the run on the screen."""

from __future__ import annotations

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.machine.devices_knob import CPU, asks_for_cpu
from trainfast_runner.records.run_file import RecordedSpec, RunFile
from trainfast_runner.settings.knob_values import KnobValue, KnobValues
from trainfast_runner.settings.knobs import KNOBS, KNOBS_BY_NAME, knob
from trainfast_runner.settings.script_preset import ScriptPreset
from trainfast_runner.settings.script_reach import LAUNCH_KNOBS, Way, reach_of
from trainfast_runner.settings.spec import SET_BY_A_BATCH_SEARCH, RunSpec, with_setting
from trainfast_tui.text.keys import SCRIPT_KEY
from trainfast_tui.text.next_run_words import typed_overrides

if TYPE_CHECKING:
    from trainfast_runner.machine.devices import Machine
    from trainfast_runner.search.advice import Situation
    from trainfast_runner.search.batch_journal import BatchSnapshot


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
        from trainfast_runner.settings.compatibility import refused_values

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


@dataclass(frozen=True)
class PresetNextRun(NextRun):
    """A model's preset with its overrides."""

    def text_of(self, name: str) -> str:
        return KNOBS_BY_NAME[name].text_of(self.spec.knobs[name])

    def headings(self, names: Iterable[str]) -> dict[str, str]:
        return {name: KNOBS_BY_NAME[name].group for name in names if self.matters(name)}

    def matters(self, name: str) -> bool:
        """True if turning the knob changes anything with this strategy and this kind of data."""
        classifies_images = self.spec.data.get("objective") == "image-classification"
        return KNOBS_BY_NAME[name].applies(self.spec.knobs) and not (name == "seq_len" and classifies_images)

    def turn(self, name: str, by: int, *, around: bool = False, skipped: Container[KnobValue] = ()) -> Self:
        entry = KNOBS_BY_NAME[name]
        value = entry.turn(self.spec.knobs[name], by, around=around, skipped=skipped)
        return self.with_value(name, entry.text_of(value))

    def with_value(self, name: str, text: str) -> Self:
        """Return a copy with a typed value of the knob; a new strategy resets knobs without use. Raises UserError."""
        next_run = replace(self, spec=with_setting(self.spec, f"{knob(name).name}={text}"))
        return next_run._with_useful_knobs() if name == "strategy" else next_run

    def reset(self, name: str) -> Self:
        """Return a copy with the knob at its preset's value; that of the strategy resets knobs without use."""
        next_run = super().reset(name)
        return next_run._with_useful_knobs() if name == "strategy" else next_run

    def _with_useful_knobs(self) -> Self:
        """Return a copy in which every override that does nothing with this strategy is reset."""
        next_run = self
        for override in self.spec.overrides:
            entry = KNOBS_BY_NAME.get(override)
            if entry is not None and entry.only_with and not entry.applies(self.spec.knobs):
                next_run = next_run.reset(override)
        return next_run

    def save(self, name: str) -> Path:
        from trainfast_runner.settings.saving import save_preset

        return save_preset(name, self.spec, overwrite=True)

    def advice(self, machine: Machine | None, situation: Situation | None) -> dict[str, str]:
        if machine is None:
            return {}
        from trainfast_runner.search.advice import Situation, advise

        advised = advise(self.spec, self.preset_knobs, machine, situation or Situation())
        texts = {advice.knob: advice.text for advice in advised}
        shapes = texts.pop("model", None)
        if shapes is not None:
            texts["batch_size"] = " ".join(filter(None, (texts.get("batch_size"), shapes)))
        return texts

    def _ranks(self, machine: Machine) -> int | None:
        from trainfast_runner.settings.device_counts import world_size

        return world_size(self.spec, machine)

    def global_batch(self, machine: Machine | None) -> tuple[int, int] | None:
        if machine is None:
            return None
        from trainfast_runner.settings.device_counts import device_count, global_batch

        try:
            devices = device_count(self.spec, machine)
        except UserError:
            return None
        per_rank = global_batch(self.spec.knobs, 1)
        total = global_batch(self.spec.knobs, devices)
        return total, total // per_rank if per_rank else 1


SCRIPTS_OWN = "script's own"
"""The value of a knob that is left to the script."""


@dataclasses.dataclass(frozen=True)
class ScriptNextRun(NextRun):
    """A script with the knobs asked of it."""

    @property
    def script(self) -> ScriptPreset:
        """The user's own script."""
        assert self.spec.script is not None
        return self.spec.script

    def text_of(self, name: str) -> str:
        values = {**LAUNCH_DEFAULTS, **self.spec.knobs}
        return KNOBS_BY_NAME[name].text_of(values[name]) if name in values else SCRIPTS_OWN

    def headings(self, names: Iterable[str]) -> dict[str, str]:
        """Return the way of every knob into the script, by the knob's name: those with a flag first."""
        ways = {entry.name: reach_of(entry.name, self.script).way for entry in KNOBS}
        in_order = dict.fromkeys((*self.script.flag_words, *ways))
        return {name: way.value for way in Way for name in in_order if ways[name] is way}

    def matters(self, name: str) -> bool:
        """True if the knob reaches the script."""
        return reach_of(name, self.script).way is not Way.NONE

    def turn(self, name: str, by: int, *, around: bool = False, skipped: Container[KnobValue] = ()) -> Self:
        return self.with_value(name, self._turned(name, by, around=around, skipped=skipped))

    def _turned(self, name: str, by: int, *, around: bool, skipped: Container[KnobValue]) -> str:
        """Return the value `by` stops along those of the script's flag, as typed; the default before any is set."""
        entry, place = KNOBS_BY_NAME[name], self.script.flag_words.get(name)
        current = self.spec.knobs.get(name, entry.default)
        ladder = [
            value
            for value in entry.values.ladder(current)
            if (not isinstance(place, dict) or entry.text_of(value) in place)
            and (value == current or value not in skipped)
        ]
        if not ladder:
            return entry.text_of(current)
        if name not in self.spec.knobs:
            return entry.text_of(entry.default if entry.default in ladder else ladder[0])
        index = (ladder.index(current) if current in ladder else 0) + by
        return entry.text_of(ladder[index % len(ladder) if around else max(0, min(len(ladder) - 1, index))])

    def with_value(self, name: str, text: str) -> Self:
        """Return a copy with a typed value of the knob. Raises UserError for one that cannot reach the script."""
        if text.strip() in ("", SCRIPTS_OWN):
            return self.reset(name)
        name = knob(name).name
        reach = reach_of(name, self.script)
        if reach.way is Way.NONE:
            raise UserError(f"{name} cannot reach {self.script.name}: {reach.text}; {SCRIPT_KEY} maps a flag", key=name)
        spec = with_setting(self.spec, f"{name}={text}")
        self.script.applied(list(self.script.command), {name: spec.knobs[name]})
        return dataclasses.replace(self, spec=spec)

    def save(self, name: str) -> Path:
        from trainfast_runner.settings.saving import save_script_preset

        script = msgspec.structs.replace(self.script, name=name, knobs=dict(self.spec.knobs))
        return save_script_preset(script, {}, overwrite=True)

    def _ranks(self, machine: Machine) -> int | None:
        from trainfast_runner.running.scripts.command import read_command

        return read_command(self.script.command, cwd=self.script.cwd).process_count


def asks_for_same(name: str, reference: object, value: object) -> bool:
    """True if a run with this value of a knob would equal a run with `reference`.

    An unset `devices` or `watch` equals every recorded value; paths are equal if they lead to the same place.
    """
    if name == "offload_path" and isinstance(reference, str) and isinstance(value, str):
        return os.path.abspath(os.path.expanduser(value)) == os.path.abspath(os.path.expanduser(reference))
    if name == "devices" and value == CPU:
        return asks_for_cpu(reference)
    return reference == value or (name in ("devices", "watch") and value is None)


def has_same_model(record: RecordedSpec, spec: RunSpec) -> bool:
    """True if the record names the same preset and model, whatever its knobs."""
    return (record.preset, record.variant, record.model) == (spec.preset, spec.variant, spec.model)


def has_same_settings(search: BatchSnapshot, spec: RunSpec) -> bool:
    """True if the search was for these knobs, apart from the knobs that a search sets itself."""
    question = search.question
    return (
        question is not None
        and has_same_model(question, spec)
        and (spec.script is None or not set(question.knobs) - set(spec.knobs) - set(SET_BY_A_BATCH_SEARCH))
        and all(
            asks_for_same(name, question.knobs.get(name), value)
            for name, value in spec.knobs.items()
            if name not in SET_BY_A_BATCH_SEARCH
        )
    )
