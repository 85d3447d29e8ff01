"""The run that `r` would start: a preset with turned knobs, and how it differs from the run on the screen."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainfast_runner.errors import UserError
from trainfast_runner.machine.cpu.device_names import CPU, asks_for_cpu
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_file import CONFIRMATION, RecordedSpec, RunFile
from trainfast_runner.settings import presets, script_preset
from trainfast_runner.settings.knob_type import KnobValues
from trainfast_runner.settings.knob_values import KnobValue
from trainfast_runner.settings.knobs import BY_NAME, defaults, knob
from trainfast_runner.settings.script_reach import Way, reach_of
from trainfast_runner.settings.spec import RunSpec, resolve, spec_of_record, with_setting
from trainfast_tui.control import script_knobs
from trainfast_tui.text.overrides import settings

if TYPE_CHECKING:
    from trainfast_runner.machine.devices import Machine
    from trainfast_runner.search.advice.facts import Situation
    from trainfast_runner.search.batch.batch_follower import BatchSnapshot
    from trainfast_runner.settings.script_preset import ScriptPreset


@dataclass(frozen=True)
class NextRun:
    """`spec` would run; `shown_run_knobs` are those of the run on the screen, `preset_knobs` the preset's own."""

    spec: RunSpec
    preset_knobs: KnobValues
    shown_run_knobs: KnobValues | None = None

    @property
    def script(self) -> ScriptPreset | None:
        """The user's own script; None for a model."""
        return self.spec.script

    def text_of(self, name: str) -> str:
        """Value of a knob as it is typed; a preset names all knobs, a script's may leave some to the script."""
        known = {**script_knobs.BY_LAUNCH, **self.spec.knobs}
        return BY_NAME[name].text_of(known[name]) if name in known else script_knobs.OWN

    @staticmethod
    def _value(knobs: KnobValues, name: str) -> KnobValue:
        return knobs.get(name, script_knobs.BY_LAUNCH.get(name))

    @property
    def reference_knobs(self) -> KnobValues:
        """Knobs of the run on the screen, or without a run those of the preset."""
        return self.preset_knobs if self.shown_run_knobs is None else self.shown_run_knobs

    def is_changed(self, name: str) -> bool:
        """True if the knob differs from `reference_knobs`."""
        return not asks_for_same(name, self._value(self.reference_knobs, name), self._value(self.spec.knobs, name))

    def reference_spec(self) -> RunSpec | None:
        """The same model with `reference_knobs`; None if no knob differs from them."""
        reference = self.reference_knobs
        changed = {name: reference[name] for name in self.spec.knobs if name in reference and self.is_changed(name)}
        return replace(self.spec, knobs={**self.spec.knobs, **changed}) if changed else None

    def fields(self) -> list[str]:
        """Overrides of the preset's model and data fields, as they are typed."""
        sections = {"model": self.spec.model, "data": self.spec.data}
        places = [key.partition(".") for key in self.spec.overrides if "." in key]
        return settings({"".join(place): sections.get(place[0], {}).get(place[2]) for place in places})

    def headings(self, names: Iterable[str]) -> dict[str, str]:
        """The headings that knobs stand under, by the knobs' names in the order of the list.

        Of a model those of `names` that matter to it, of a script all.
        """
        if self.script is not None:
            return script_knobs.headings(self.script)
        return {name: BY_NAME[name].group for name in names if self.matters(name)}

    def matters(self, name: str) -> bool:
        """True if turning the knob changes anything with this strategy and this kind of data."""
        if self.script is not None:
            return reach_of(name, self.script).way is not Way.NONE
        classifies_images = self.spec.data.get("objective") == "image-classification"
        return BY_NAME[name].applies(self.spec.knobs) and not (name == "seq_len" and classifies_images)

    def repeats(self, run: RunFile) -> bool:
        """True if it would be that run again."""
        spec = self.spec
        return (spec.preset, spec.variant, spec.model) == (run.preset, run.variant, run.model) and all(
            asks_for_same(name, run.knobs.get(name), value) for name, value in spec.knobs.items()
        )

    def turn(self, name: str, by: int, *, around: bool = False) -> NextRun:
        """Turn the knob `by` stops along its values; `around` goes on at the other end. Raises UserError."""
        if self.script is not None:
            text = script_knobs.turned_value(self.spec, self.script, name, by, around=around)
            return self.with_value(name, text)
        entry, current = BY_NAME[name], self.spec.knobs[name]
        value = entry.turn(current, by)
        if around and value == current:
            ladder = list(entry.values.ladder(current))
            value = ladder[0 if by > 0 else -1]
        return self.with_value(name, entry.text_of(value))

    def with_value(self, name: str, text: str) -> NextRun:
        """Return a copy with a typed value of the knob; a new strategy resets knobs without use. Raises UserError."""
        if self.script is not None:
            if text.strip() in ("", script_knobs.OWN):
                return self.reset(name)
            return replace(self, spec=script_knobs.with_typed(self.spec, self.script, name, text))
        turned = replace(self, spec=with_setting(self.spec, f"{knob(name).name}={text}"))
        if name == "strategy":
            for other in turned.spec.overrides:
                entry = BY_NAME.get(other)
                if entry is not None and entry.only_with and not entry.applies(turned.spec.knobs):
                    turned = turned.reset(other)
        return turned

    def reset(self, name: str) -> NextRun:
        """Return a copy with the knob at its preset's value, or left to the script."""
        spec = self.spec
        knobs = dict(spec.knobs)
        if name in self.preset_knobs:
            knobs[name] = self.preset_knobs[name]
        else:
            knobs.pop(name, None)
        changed = tuple(override for override in spec.overrides if override != name)
        return replace(self, spec=replace(spec, knobs=knobs, overrides=changed))

    def with_value_of(self, name: str, earlier: NextRun) -> NextRun:
        """Return a copy with the knob at its value in `earlier`."""
        if name in earlier.spec.overrides:
            return self.with_value(name, earlier.text_of(name))
        return self.reset(name)

    def save(self, name: str) -> Path:
        """Save the knobs as a preset of the user's own, and return its file. Raises UserError."""
        if self.script is not None:
            from trainfast_runner.settings.saving_script import save_script_preset

            return save_script_preset(replace(self.script, name=name, knobs=dict(self.spec.knobs)), {})
        from trainfast_runner.settings.saving import save_preset

        return save_preset(name, self.spec)

    def advice(self, machine: Machine | None, situation: Situation | None) -> dict[str, str]:
        """The advisor's texts by the name of the knob that each stands beside.

        Empty while the machine is unknown, and for a script.
        """
        if machine is None or self.script is not None:
            return {}
        from trainfast_runner.search.advice.advisor import advise
        from trainfast_runner.search.advice.facts import Situation

        by_knob = {one.knob: one for one in advise(self.spec, self.preset_knobs, machine, situation or Situation())}
        shapes = by_knob.pop("model", None)
        texts = {name: one.text for name, one in by_knob.items()}
        if shapes is not None:
            texts["batch_size"] = " ".join(filter(None, (texts.get("batch_size"), shapes.text)))
        return texts

    def ranks(self, machine: Machine | None) -> int | None:
        """Processes of the run; None while the machine is unknown, if they are refused, or if a launcher counts."""
        if machine is None:
            return None
        try:
            if self.script is not None:
                from trainfast_runner.running.scripts.command import read_command

                return read_command(self.script.command, cwd=self.script.cwd).processes
            from trainfast_runner.settings.world import world_size

            return world_size(self.spec, machine)
        except UserError:
            return None

    def global_batch(self, machine: Machine | None) -> tuple[int, int] | None:
        """Samples of one optimizer step and the data-parallel ranks that share them.

        None while the machine is unknown, if the devices are refused, and for a script.
        """
        if machine is None or self.script is not None:
            return None
        from trainfast_runner.settings.world import device_count, global_batch

        try:
            devices = device_count(self.spec, machine)
        except UserError:
            return None
        per_rank = global_batch(self.spec.knobs, 1)
        total = global_batch(self.spec.knobs, devices)
        return total, total // per_rank if per_rank else 1


def preset_choices() -> list[tuple[str, str]]:
    """(name, title) of each preset, its variants below it; the title of a broken preset is its error."""
    choices: list[tuple[str, str]] = []
    for name in presets.preset_files():
        if (path := script_preset.path_of(name)) is not None:
            choices.append((name, _script_title(path)))
            continue
        try:
            preset, _ = presets.load(name)
        except UserError as error:
            choices.append((name, f"cannot be used: {error.line()}"))
            continue
        choices.append((name, preset.title))
        for variant in preset.variants:
            knobs = ", ".join(f"{key}={value}" for key, value in variant.knobs.items())
            choices.append((f"{name}/{variant.id}", knobs or "as the preset"))
    return choices


def _script_title(path: Path) -> str:
    try:
        return f"your script: {script_preset.load(path).title}"
    except UserError as error:
        return f"cannot be used: {error.line()}"


def next_run_from_preset(preset: str) -> NextRun:
    """The next run of a preset or variant as it is written. Raises UserError."""
    if (path := script_preset.path_of(preset)) is not None:
        spec = script_knobs.spec_of(script_preset.load(path))
    else:
        spec = resolve(preset)
    return NextRun(spec, dict(spec.knobs))


def repeat_run(run: RunFile, home: Home) -> NextRun | None:
    """The next run that repeats this one; None for a script's run that cannot be repeated by its knobs."""
    if run.script is None:
        return repeat_preset_run(run, home)
    spec = script_knobs.repeated(run)
    if spec is None or spec.script is None:
        return None
    return NextRun(spec, dict(spec.script.knobs), shown_run_knobs=run.knobs)


def with_comparison(next_run: NextRun, run: RunFile | None) -> NextRun:
    """The next run compared with this run, unless a script would be compared with the training of something else."""
    of_scripts = run is not None and (run.script is not None or next_run.script is not None)
    if run is None or (of_scripts and not has_same_model(run, next_run.spec)):
        return replace(next_run, shown_run_knobs=None)
    return replace(next_run, shown_run_knobs=run.knobs)


def repeat_preset_run(run: RunFile, home: Home) -> NextRun:
    """The next run that repeats a preset's run: its model, data and knobs, whatever has become of the preset.

    For a search's confirmation run, whose steps and batch the search chose, it is the settings that were searched.
    """
    preset_knobs = _preset_knobs(run)
    asked = _searched_settings(run, home) if run.role == CONFIRMATION else None
    spec = spec_of_record(asked or run)
    if run.role == CONFIRMATION and asked is None:
        from trainfast_runner.search.searches import SET_BY_A_SEARCH

        spec = replace(spec, knobs={**spec.knobs, **{name: preset_knobs[name] for name in SET_BY_A_SEARCH}})
    if "devices" not in run.overrides:
        # The launcher wrote down how many it chose; the next run chooses anew.
        spec = replace(spec, knobs={**spec.knobs, "devices": preset_knobs.get("devices")})
    return NextRun(spec, preset_knobs, shown_run_knobs=run.knobs)


def _searched_settings(run: RunFile, home: Home) -> RecordedSpec | None:
    """The settings that the run's search was started with; None if its journal cannot be read."""
    if run.search_id is None:
        return None
    from trainfast_runner.search.journal.batch import BatchQuestion, read_batch_journal

    try:
        lines = read_batch_journal(home.search_directory(run.search_id))
    except OSError:
        return None
    return next((line for line in lines if isinstance(line, BatchQuestion)), None)


def _preset_knobs(run: RunFile) -> KnobValues:
    try:
        return resolve(run.name).knobs
    except UserError:
        return defaults()


def asks_for_same(name: str, reference: object, value: object) -> bool:
    """True if a knob's value asks for what a run with `reference` got: "as many as the strategy takes" equals the
    number it took, and a path the place it leads to."""
    if name == "offload_path" and isinstance(reference, str) and isinstance(value, str):
        return os.path.abspath(os.path.expanduser(value)) == os.path.abspath(os.path.expanduser(reference))
    if name == "devices" and value == CPU:
        return asks_for_cpu(reference)
    return reference == value or (name in ("devices", "watch") and value is None)


def has_same_model(record: RecordedSpec, spec: RunSpec) -> bool:
    """True if the record is of the same preset and model, whatever its knobs."""
    return (record.preset, record.variant, record.model) == (spec.preset, spec.variant, spec.model)


def spec_to_continue(record: RecordedSpec, spec: RunSpec) -> RunSpec:
    """The settings of a search about the same model or script as `spec`, to go on with that search."""
    if spec.script is None:
        return spec_of_record(record)
    return replace(spec, knobs=dict(record.knobs), overrides=tuple(record.overrides))


def next_run_from_search(record: RecordedSpec) -> NextRun:
    """The next run with the settings of a search, beside its own preset. Raises UserError if the preset is gone."""
    from trainfast_runner.search.searches import SET_BY_A_SEARCH

    own = next_run_from_preset(record.name)
    spec = spec_to_continue(record, own.spec)
    if spec.script is not None:
        # The steps of a trial are the search's, not the person's.
        asked = {name: value for name, value in spec.knobs.items() if name not in SET_BY_A_SEARCH}
        kept = {name: value for name, value in own.spec.knobs.items() if name in SET_BY_A_SEARCH}
        overrides = tuple(name for name in spec.overrides if name not in SET_BY_A_SEARCH)
        spec = replace(spec, knobs={**asked, **kept}, overrides=overrides)
    return replace(own, spec=spec)


def has_same_settings(search: BatchSnapshot, spec: RunSpec) -> bool:
    """True if the search was for these knobs, apart from the knobs that a search sets itself."""
    from trainfast_runner.search.searches import SET_BY_A_BATCH_SEARCH

    asked = search.question
    return (
        asked is not None
        and has_same_model(asked, spec)
        and (spec.script is None or not set(asked.knobs) - set(spec.knobs) - set(SET_BY_A_BATCH_SEARCH))
        and all(
            asks_for_same(name, asked.knobs.get(name), value)
            for name, value in spec.knobs.items()
            if name not in SET_BY_A_BATCH_SEARCH
        )
    )
