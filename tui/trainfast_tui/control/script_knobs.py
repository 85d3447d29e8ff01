"""The knobs of a script of the user's own: which reach it, what each is asked for, and the script's run again."""

from __future__ import annotations

from trainfast_runner.errors import UserError
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.settings import script_preset
from trainfast_runner.settings.knob_values import KnobValue
from trainfast_runner.settings.knobs import BY_NAME, KNOBS, knob
from trainfast_runner.settings.script_preset import ScriptPreset
from trainfast_runner.settings.script_reach import LAUNCH, Way, reach_of
from trainfast_runner.settings.spec import RunSpec, with_setting

OWN = "script's own"
"""The value of a knob that is left to the script."""
BY_LAUNCH = {name: BY_NAME[name].default for name in LAUNCH if name != "steps"}
"""Defaults of the knobs that are not the script's; without `steps` it runs to its own end."""


def spec_of(script: ScriptPreset) -> RunSpec:
    """The spec of a script's preset as written."""
    return RunSpec(script.name, None, script.title or script.name, {}, {}, dict(script.knobs), script=script)


def headings(script: ScriptPreset) -> dict[str, str]:
    """The way of every knob into the script, by the knob's name: those with a flag first."""
    ways = {entry.name: reach_of(entry.name, script).way for entry in KNOBS}
    in_order = [*script.places, *ways]
    return {name: way.value for way in Way for name in dict.fromkeys(in_order) if ways[name] is way}


def turned_value(spec: RunSpec, script: ScriptPreset, name: str, by: int, *, around: bool) -> str:
    """The value `by` stops along those that have words in the script, as it is typed; the default before any is set."""
    entry, place = BY_NAME[name], script.places.get(name)
    current = spec.knobs.get(name, entry.default)
    ladder = [value for value in entry.values.ladder(current) if _has_words(place, name, value)]
    if not ladder:
        return entry.text_of(current)
    if name not in spec.knobs:
        return entry.text_of(entry.default if entry.default in ladder else ladder[0])
    at = (ladder.index(current) if current in ladder else 0) + by
    return entry.text_of(ladder[at % len(ladder) if around else max(0, min(len(ladder) - 1, at))])


def with_typed(spec: RunSpec, script: ScriptPreset, name: str, text: str) -> RunSpec:
    """The spec with a typed value of the knob. Raises UserError for a knob or a value that cannot reach the script."""
    name = knob(name).name
    reach = reach_of(name, script)
    if reach.way is Way.NONE:
        raise UserError(f"{name} cannot reach {script.name}: {reach.words}", key=name)
    turned = with_setting(spec, f"{name}={text}")
    script.applied(list(script.command), {name: turned.knobs[name]})
    return turned


def repeated(run: RunFile) -> RunSpec | None:
    """The script of this run again; None for a trial of a search, and where the run had more than its knobs.

    Its preset is taken if the file is still there, else its command with the flags that it ran with.
    """
    asked = run.script
    if asked is None or asked.trial or asked.steps_from_log or asked.samples_per_step:
        return None
    script = _preset_of(run)
    kept: dict[str, KnobValue] = {}
    if script is None:
        kept = {name: value for name, value in run.knobs.items() if name not in asked.flagged}
        script = ScriptPreset(command=tuple(asked.command), name=run.preset, title=run.title, cwd=run.cwd)
    else:
        kept = {name: value for name, value in run.knobs.items() if reach_of(name, script).way is not Way.NONE}
    knobs = {**script.knobs, **{name: knob(name).read(value) for name, value in kept.items() if name in BY_NAME}}
    if knobs.get("timing_warmup") == BY_NAME["timing_warmup"].default:
        knobs.pop("timing_warmup", None)
    changed = tuple(name for name, value in knobs.items() if script.knobs.get(name) != value)
    return RunSpec(script.name, None, script.title or script.name, {}, {}, knobs, changed, script)


def _preset_of(run: RunFile) -> ScriptPreset | None:
    """The script's preset of this name, if it starts in the run's folder; None without one."""
    path = script_preset.path_of(run.preset)
    try:
        script = script_preset.load(path) if path is not None else None
    except UserError:
        return None
    return script if script is not None and script.cwd in ("", run.cwd) else None


def _has_words(place: script_preset.Place | None, name: str, value: KnobValue) -> bool:
    return not isinstance(place, dict) or BY_NAME[name].text_of(value) in place
