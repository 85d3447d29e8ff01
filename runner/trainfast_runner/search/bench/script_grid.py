"""The rows of `bench --vary` for a script of the user's own: every row is a trial, which leaves nothing behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from trainfast_runner.errors import UserError
from trainfast_runner.search.bench.grid import check_count, id_of
from trainfast_runner.search.bench.variants import Bench, PlannedRow
from trainfast_runner.search.script_runs import ScriptPlanner, script_planner
from trainfast_runner.settings.knob_values import KnobValue
from trainfast_runner.settings.knobs import knob
from trainfast_runner.settings.scripts.script_preset import ScriptPreset
from trainfast_runner.settings.set_by_searches import SET_BY_A_BATCH_SEARCH
from trainfast_runner.settings.spec import RunSpec
from trainfast_runner.settings.typed_settings import setting_of
from trainfast_runner.settings.vary import Vary, combinations_of

AS_IT_IS_ID = "as it is"
"""The baseline's id where the preset sets none of the varied knobs."""


def prepare_script_grid(preset: ScriptPreset, vary: Vary, settings: Sequence[str], python: str | None) -> Bench:
    """Return a row for each combination of the varied values; the baseline is the script at the preset's own.

    Raises UserError without varied values, and for too many rows.
    """
    if not vary:
        raise UserError(
            f"{preset.name} is a script: name the values to compare",
            key="--vary",
            advice=f"trainfast-tui bench {preset.name} --vary batch_size=8,16",
        )
    check_count(vary, 1)
    base = {**preset.knobs, **dict(setting_of(setting) for setting in settings)}
    base = {"steps": knob("steps").default, **base}
    own_knobs = {name: base[name] for name in vary if name in base}
    combinations = list(combinations_of(vary))
    if own_knobs not in combinations:
        combinations = [own_knobs, *combinations]
    plan_script_run = script_planner(preset, settings, python, SET_BY_A_BATCH_SEARCH)
    planned_rows = [_planned_row(preset, base, combination, plan_script_run) for combination in combinations]
    return Bench(preset.name, preset.title, id_of(own_knobs) or AS_IT_IS_ID, tuple(planned_rows), varied=tuple(vary))


def _planned_row(
    preset: ScriptPreset,
    base: Mapping[str, KnobValue],
    combination: Mapping[str, KnobValue],
    plan_script_run: ScriptPlanner,
) -> PlannedRow:
    knobs = {**base, **combination}
    spec = RunSpec(preset.name, None, preset.title, model={}, data={}, knobs=knobs, overrides=tuple(knobs))
    return PlannedRow(id_of(combination) or AS_IT_IS_ID, spec, {}, partial(plan_script_run, knobs))
