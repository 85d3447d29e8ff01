"""The next run made from a preset, a run or a search, and the presets to choose from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.records.run_file import RecordedSpec, RunFile
from trainfast_runner.settings import presets, script_preset
from trainfast_runner.settings.knob_values import KnobValues
from trainfast_runner.settings.knobs import KNOBS_BY_NAME, defaults, knob
from trainfast_runner.settings.script_preset import ScriptPreset
from trainfast_runner.settings.script_reach import Way, reach_of
from trainfast_runner.settings.spec import SET_BY_A_SEARCH, RunSpec, resolve, spec_of_record
from trainfast_runner.units import counted
from trainfast_tui.next_run.next_run import NextRun
from trainfast_tui.text.format import percent_change

if TYPE_CHECKING:
    from trainfast_runner.memory.headroom import PredictedFit
    from trainfast_runner.records.run_file import PredictedSpeed


def preset_choices(fit_words: Callable[[RunSpec], str] = lambda spec: "") -> list[tuple[str, str]]:
    """Return (name, title) of each preset, those with variants last; the title of a broken preset is its error.

    `fit_words` returns what is known of a preset's size, to stand before its title.
    """
    plain: list[tuple[str, str]] = []
    with_variants: list[tuple[str, str]] = []
    for name in presets.preset_files():
        path = script_preset.path_of(name)
        try:
            if path is not None:
                plain.append((name, f"your script: {script_preset.load(path).title}"))
            elif variants := presets.load(name)[0].variants:
                with_variants.append((name, f"{counted(len(variants), 'variant')}: {presets.load(name)[0].title}"))
            else:
                spec = resolve(name)
                plain.append((name, f"{fit_words(spec)}{spec.title}"))
        except UserError as error:
            plain.append((name, f"cannot be used: {error.line_without_option()}"))
    return plain + with_variants


def variant_choices(name: str) -> list[tuple[str, str]]:
    """Return (name, settings) of a preset and each of its variants; empty without variants."""
    if script_preset.path_of(name) is not None or not (variants := presets.load(name)[0].variants):
        return []
    settings = ((one.id, ", ".join(f"{key}={value}" for key, value in one.knobs.items())) for one in variants)
    return [(name, "the preset itself"), *((f"{name}/{variant_id}", words) for variant_id, words in settings)]


def next_run_from_preset(preset: str) -> NextRun:
    """Return the next run of a preset or variant as it is written. Raises UserError."""
    if (path := script_preset.path_of(preset)) is not None:
        return next_run_from_script(script_preset.load(path))
    spec = resolve(preset)
    return NextRun(spec, dict(spec.knobs))


def next_run_from_script(script: ScriptPreset) -> NextRun:
    """Return the next run of a script's preset as it is written."""
    return NextRun(_script_spec(script, dict(script.knobs)), dict(script.knobs))


def _script_spec(script: ScriptPreset, knobs: KnobValues, overrides: Iterable[str] = ()) -> RunSpec:
    return RunSpec(script.name, None, script.title or script.name, {}, {}, knobs, tuple(overrides), script)


def repeat_run(run_file: RunFile) -> NextRun | None:
    """Return the next run that repeats this one; None for a script's run that cannot be repeated by its knobs."""
    if run_file.script is not None:
        return _repeat_script_run(run_file)
    try:
        return repeat_preset_run(run_file)
    except UserError:
        return None  # settings of a newer version


def repeat_preset_run(run_file: RunFile) -> NextRun:
    """Return the next run that repeats a preset's run, with its model, data and knobs even if the preset has changed.

    The steps of a search's run are the search's: those of the preset take their place.
    """
    preset_knobs = _preset_knobs(run_file)
    spec = spec_of_record(run_file)
    replaced = {} if run_file.role is None else {name: preset_knobs[name] for name in SET_BY_A_SEARCH}
    if "devices" not in run_file.overrides:
        # The launcher wrote down how many it chose; the next run chooses again.
        replaced["devices"] = preset_knobs.get("devices")
    spec = replace(spec, knobs={**spec.knobs, **replaced})
    return NextRun(spec, preset_knobs, shown_run_knobs=run_file.knobs)


def _preset_knobs(run_file: RunFile) -> KnobValues:
    try:
        return resolve(run_file.name).knobs
    except UserError:
        return defaults()


def _repeat_script_run(run_file: RunFile) -> NextRun | None:
    """Return the next run of this run's script.

    The script's preset is taken if its file is still there, else the recorded command with its flags. None for a trial,
    a run with `--steps-from-log` or `--samples-per-step`, and a knob value unknown to this version.
    """
    record = run_file.script
    if record is None or record.trial or record.steps_from_log or record.samples_per_step:
        return None
    script = _script_preset(run_file)
    if script is None:
        recorded_knobs = {name: value for name, value in run_file.knobs.items() if name not in record.flagged}
        script = ScriptPreset(
            command=tuple(record.command), name=run_file.preset, title=run_file.title, cwd=run_file.cwd
        )
    else:
        recorded_knobs = {
            name: value for name, value in run_file.knobs.items() if reach_of(name, script).way is not Way.NONE
        }
    try:
        read_knobs = {name: knob(name).read(value) for name, value in recorded_knobs.items() if name in KNOBS_BY_NAME}
    except UserError:
        return None
    knobs = {**script.knobs, **read_knobs}
    overrides = [name for name, value in knobs.items() if script.knobs.get(name) != value]
    return NextRun(_script_spec(script, knobs, overrides), dict(script.knobs), shown_run_knobs=run_file.knobs)


def _script_preset(run_file: RunFile) -> ScriptPreset | None:
    """Return the script's preset of this name, if it starts in the run's folder; None without one."""
    path = script_preset.path_of(run_file.preset)
    try:
        script = script_preset.load(path) if path is not None else None
    except UserError:
        return None
    return script if script is not None and script.cwd in ("", run_file.cwd) else None


def next_run_from_search(record: RecordedSpec) -> NextRun:
    """Return the next run with the settings of a search of its preset. Raises UserError if the preset is gone."""
    preset_next_run = next_run_from_preset(record.name)
    spec = spec_to_continue(record, preset_next_run.spec)
    if spec.script is not None:
        # The steps of a trial are the search's, not the person's.
        searched_knobs = {name: value for name, value in spec.knobs.items() if name not in SET_BY_A_SEARCH}
        own_steps = {name: value for name, value in preset_next_run.spec.knobs.items() if name in SET_BY_A_SEARCH}
        overrides = tuple(name for name in spec.overrides if name not in SET_BY_A_SEARCH)
        spec = replace(spec, knobs={**searched_knobs, **own_steps}, overrides=overrides)
    return replace(preset_next_run, spec=spec)


def spec_to_continue(record: RecordedSpec, spec: RunSpec) -> RunSpec:
    """Return the settings that continue a search about the same model or script as `spec`."""
    if spec.script is None:
        return spec_of_record(record)
    return replace(spec, knobs=dict(record.knobs), overrides=tuple(record.overrides))


class NextRunMemory(msgspec.Struct, frozen=True):
    """The predicted memory of the next run."""

    fit: PredictedFit | None = None
    spec: RunSpec | None = None
    """The predicted settings, with their number of devices; None without a prediction."""
    reason: str = ""
    """Why there is no prediction, or none yet."""
    failed: bool = False
    """True if there will be no prediction."""
    since_ns: int | None = None
    """CLOCK_MONOTONIC at which the trace under way began."""
    reference_bytes: int | None = None
    """The peak predicted for the knobs of the run on the screen, or of the preset; None if all are the same."""


class NextRunSpeed(msgspec.Struct, frozen=True):
    """The predicted speed of the next run."""

    predicted: PredictedSpeed
    reference_samples_per_s: float | None = None
    """The predicted median for the knobs of the run on the screen, or of the preset; None if all are the same."""

    @property
    def change_percent(self) -> float | None:
        """The predicted change from the run on the screen, or from the preset; None if all knobs are the same."""
        return percent_change(self.predicted.median, self.reference_samples_per_s)
