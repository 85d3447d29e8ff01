"""The run that `r` would start, and how it differs from the run on the screen."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.records.run_file import RecordedSpec, RunFile
from trainfast_runner.settings.knob_values import KnobValue, KnobValues
from trainfast_runner.settings.knobs import KNOBS, KNOBS_BY_NAME, knob
from trainfast_runner.settings.script_preset import ScriptPreset
from trainfast_runner.settings.script_reach import LAUNCH_KNOBS, Way, reach_of, values_taken
from trainfast_runner.settings.spec import SET_BY_A_BATCH_SEARCH, RunSpec, with_setting
from trainfast_runner.units import CPU, asks_for_cpu
from trainfast_tui.text.keys import SCRIPT_KEY
from trainfast_tui.text.next_run_words import typed_overrides

if TYPE_CHECKING:
    from trainfast_runner.machine.devices import Machine
    from trainfast_runner.search.advice import Situation
    from trainfast_runner.search.batch_journal import BatchSnapshot


LAUNCH_DEFAULTS = {name: KNOBS_BY_NAME[name].default for name in LAUNCH_KNOBS if name != "steps"}
"""Defaults of the knobs that are not the script's; without `steps` it runs to completion."""


SCRIPTS_OWN = "script's own"
"""The value of a knob that is left to the script."""


@dataclass(frozen=True)
class NextRun:
    """Settings of the next run, with the knobs of its preset and of the run on the screen to compare with.

    It trains a preset's model, or runs a script with the knobs asked of it.
    """

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
        """Return a copy with the knob at its preset's value, or left to the script; as `with_value` for a strategy."""
        knobs = dict(self.spec.knobs)
        if name in self.preset_knobs:
            knobs[name] = self.preset_knobs[name]
        else:
            knobs.pop(name, None)
        overrides = tuple(override for override in self.spec.overrides if override != name)
        return replace(self, spec=replace(self.spec, knobs=knobs, overrides=overrides)).after_turning(name)

    def ranks(self, machine: Machine | None) -> int | None:
        """Return the number of processes; None while the machine is unknown, if refused, or if a launcher sets it."""
        if machine is None:
            return None
        try:
            if self.script is None:
                from trainfast_runner.settings.device_counts import world_size

                return world_size(self.spec, machine)
            from trainfast_runner.running.command import read_command

            return read_command(self.script.command, cwd=self.script.cwd).process_count
        except UserError:
            return None

    def text_of(self, name: str) -> str:
        """Return the value of a knob as it is typed."""
        values = {**LAUNCH_DEFAULTS, **self.spec.knobs}
        return KNOBS_BY_NAME[name].text_of(values[name]) if name in values else SCRIPTS_OWN

    def headings(self, names: Iterable[str]) -> dict[str, str]:
        """Return the heading of each listed knob by name, in list order.

        A model lists the knobs of `names` that matter to it under their groups, a script all knobs under their ways
        into the script, those with a flag first.
        """
        if self.script is None:
            return {name: KNOBS_BY_NAME[name].group for name in names if self.matters(name)}
        ways = {entry.name: reach_of(entry.name, self.script).way for entry in KNOBS}
        in_order = dict.fromkeys((*self.script.flag_words, *ways))
        return {name: way.value for way in Way for name in in_order if ways[name] is way}

    def folded(self, machine: Machine | None) -> tuple[str, ...]:
        """Return the unchanged knobs that do nothing on this machine; empty while it is unknown, and for a script."""
        if machine is None or self.script is not None:
            return ()
        count = len(machine.nvml_gpus)
        return tuple(entry.name for entry in KNOBS if count < entry.min_gpus and not self.is_changed(entry.name))

    def matters(self, name: str) -> bool:
        """True if turning the knob reaches the script, or changes anything with this strategy and kind of data."""
        if self.script is not None:
            return reach_of(name, self.script).way is not Way.NONE
        classifies_images = self.spec.data.get("objective") == "image-classification"
        return KNOBS_BY_NAME[name].applies(self.spec.knobs) and not (name == "seq_len" and classifies_images)

    def refused_values(self, name: str, machine: Machine | None) -> dict[KnobValue, str]:
        """Return the values of a knob that cannot work on the devices of the run, each with the reason.

        The present value is one of them if this machine lacks the devices for it. Empty while the machine is unknown.
        """
        if machine is None:
            return {}
        from trainfast_runner.settings.compatibility import refusal_here, refused_values

        refused = refused_values(name, self.spec, machine)
        error = refusal_here(self.spec, machine) if self.script is None else None
        if error is not None and error.key == name:
            refused[self.spec.knobs[name]] = error.line_without_option()
        return refused

    def turn(self, name: str, by: int, *, around: bool = False, skipped: Container[KnobValue] = ()) -> Self:
        """Turn the knob `by` stops along its values without `skipped`; `around` goes on at the other end.

        A script's knob has the values that its flag takes, its default before any is set. Raises UserError.
        """
        entry = KNOBS_BY_NAME[name]
        current = self.spec.knobs.get(name, entry.default)
        if self.script is not None:
            taken = values_taken(name, self.script)
            ladder = [value for value in entry.values.ladder(current) if value == current or value not in skipped]
            if taken is not None:
                ladder = [value for value in ladder if entry.text_of(value) in taken]
            if not ladder or name not in self.spec.knobs:
                value = current if current in ladder or not ladder else ladder[0]
                return self.with_value(name, entry.text_of(value))
            skipped = [value for value in entry.values.ladder(current) if value not in ladder]
        return self.with_value(name, entry.text_of(entry.turn(current, by, around=around, skipped=skipped)))

    def with_value(self, name: str, text: str) -> Self:
        """Return a copy with a typed value of the knob; a new strategy resets knobs without use.

        Raises UserError, also for a value that cannot reach the script.
        """
        if self.script is not None and text.strip() in ("", SCRIPTS_OWN):
            return self.reset(name)
        name = knob(name).name
        if self.script is not None and (reach := reach_of(name, self.script)).way is Way.NONE:
            words = f"{name} cannot reach {self.script.name}: {reach.text}; {SCRIPT_KEY} maps a flag"
            raise UserError(words, key=name)
        spec = with_setting(self.spec, f"{name}={text}")
        if self.script is not None:
            self.script.applied(list(self.script.command), {name: spec.knobs[name]})
        return replace(self, spec=spec).after_turning(name)

    def after_turning(self, name: str) -> Self:
        """Return a copy in which every override that does nothing with a new strategy or method is reset."""
        next_run = self
        for override in self.spec.overrides if self.script is None else ():
            entry = KNOBS_BY_NAME.get(override)
            if entry is not None and entry.obeyed_by == name and not entry.applies(self.spec.knobs):
                next_run = next_run.reset(override)
        return next_run

    def save(self, name: str) -> Path:
        """Save the knobs as a preset of the user's own, in place of a preset of that name, and return the file.

        Raises UserError.
        """
        from trainfast_runner.settings.saving import save_preset, save_script_preset

        if self.script is None:
            return save_preset(name, self.spec, overwrite=True)
        script = msgspec.structs.replace(self.script, name=name, knobs=dict(self.spec.knobs))
        return save_script_preset(script, {}, overwrite=True)

    def advice(self, machine: Machine | None, situation: Situation | None) -> dict[str, str]:
        """Return the advisor's texts by the name of the knob that each stands beside.

        Empty while the machine is unknown, and for a script.
        """
        if machine is None or self.script is not None:
            return {}
        from trainfast_runner.search.advice import Situation, advise

        advised = advise(self.spec, self.preset_knobs, machine, situation or Situation())
        texts = {advice.knob: advice.text for advice in advised}
        shapes = texts.pop("model", None)
        if shapes is not None:
            texts["batch_size"] = " ".join(filter(None, (texts.get("batch_size"), shapes)))
        return texts

    def global_batch(self, machine: Machine | None) -> tuple[int, int] | None:
        """Return the samples of one optimizer step and the data-parallel ranks that share them.

        None while the machine is unknown, if the devices are refused, and for a script.
        """
        if machine is None or self.script is not None:
            return None
        from trainfast_runner.settings.device_counts import device_count, global_batch

        try:
            devices = device_count(self.spec, machine)
        except UserError:
            return None
        per_rank = global_batch(self.spec.knobs, 1)
        total = global_batch(self.spec.knobs, devices)
        return total, total // per_rank if per_rank else 1


def _value_or_default(knobs: KnobValues, name: str) -> KnobValue:
    return knobs.get(name, LAUNCH_DEFAULTS.get(name))


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
