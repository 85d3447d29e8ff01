"""The rows of a bench: a preset's variants beside their baseline, and the order in which they are run.

Runs interleave (A B A B), so that drift of the machine affects every row equally.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from trainfast_runner.errors import UserError, nearest
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.searches import ScriptPlanner, script_planner, with_knobs
from trainfast_runner.settings import presets
from trainfast_runner.settings.knob_values import KnobValue, whole_number
from trainfast_runner.settings.knobs import KNOBS_BY_NAME, Vary, combinations_of, fewest_to_drop, knob, setting_of
from trainfast_runner.settings.script_preset import ScriptPreset
from trainfast_runner.settings.spec import SET_BY_A_BATCH_SEARCH, RunSpec, from_preset, published_for


@dataclass(frozen=True)
class PlannedRow:
    """One row to be run."""

    id: str
    spec: RunSpec
    published: Mapping[str, Any]
    plan: Callable[[], RunPlan] | None = None
    """Plans a row of a user's own script; None for a preset's. Raises UserError."""


@dataclass(frozen=True)
class Bench:
    """The rows to be run, the baseline among them."""

    preset: str
    title: str
    baseline_id: str
    rows: tuple[PlannedRow, ...]
    unpublished: str = ""
    """Why the published figures are left out; empty if they are not."""
    varied: tuple[str, ...] = ()
    """The knobs of `--vary`, whose values are in the ids."""


def prepare_variants(reference: str, settings: Sequence[str] = (), scale_batch: float = 1.0) -> Bench:
    """Return the rows of PRESET, or for NAME/VARIANT that one and the baseline, with every setting applied.

    `scale_batch` multiplies each row's batch_size, which stays at least 1. Raises UserError.
    """
    preset, chosen_variant = presets.load(reference)
    baseline = preset.baseline_variant
    if baseline is None:
        tables = [name for name in presets.preset_files() if _has_variants(name)]
        raise UserError(
            f"preset {preset.name} has no variants to compare",
            key=reference,
            allowed=tables,
            nearest=nearest(preset.name, tables),
            advice=f"trainfast-tui bench {preset.name} --vary batch_size=8,16",
        )
    planned_rows = []
    unpublished = ""
    for variant in preset.variants:
        if chosen_variant is None or variant.id in (chosen_variant.id, baseline.id):
            spec = from_preset(preset, variant, settings)
            published, reason = published_for(preset, variant, spec)
            planned_rows.append(PlannedRow(variant.id, scaled(spec, scale_batch), published))
            unpublished = unpublished or reason
    return Bench(preset.name, preset.title, baseline.id, tuple(planned_rows), unpublished)


def scaled(spec: RunSpec, factor: float) -> RunSpec:
    """Return the run with its batch_size multiplied by `factor`, at least 1."""
    if factor == 1.0:
        return spec
    return spec.with_overrides(batch_size=max(1, round(whole_number(spec.knobs, "batch_size") * factor)))


def run_order(bench: Bench, repeat: int, groups: Mapping[str, str]) -> Iterator[PlannedRow]:
    """Yield the row of every run: the baseline first in each repetition, rows of one group after each other."""
    rows = sorted(bench.rows, key=lambda row: row.id != bench.baseline_id)
    # A group stands where its first row stands.
    order = list(dict.fromkeys(groups.get(row.id, row.id) for row in rows))
    rows.sort(key=lambda row: order.index(groups.get(row.id, row.id)))
    for _ in range(repeat):
        yield from rows


def _has_variants(name: str) -> bool:
    try:
        return bool(presets.load(name)[0].variants)
    except UserError:
        return False


MAX_ROWS = 200
"""The most rows of a grid; 200 runs of a quarter of a minute take 50 minutes."""
Combination = Mapping[str, KnobValue]
"""A value for each varied knob."""


def prepare_grid(reference: str, vary: Vary, settings: Sequence[str] = (), scale_batch: float = 1.0) -> Bench:
    """Return a row for each combination of the varied values, on top of PRESET or PRESET/VARIANT.

    A PRESET with variants gets these rows for every variant. The baseline is the preset (or its baseline variant, or
    VARIANT) at its own settings, a row of its own unless the grid has it. Raises UserError for too many rows.
    """
    preset, chosen_variant = presets.load(reference)
    if scale_batch != 1.0 and "batch_size" in vary:
        raise UserError("--scale-batch would change the sizes of --vary batch_size", key="--scale-batch")
    bases = preset.variants if chosen_variant is None and preset.variants else (chosen_variant,)
    check_count(vary, len(bases))
    baseline = preset.baseline_variant if chosen_variant is None else chosen_variant
    combinations = list(combinations_of(vary))
    planned_rows: list[PlannedRow] = []
    baseline_id = unpublished = ""
    for base in bases:
        spec = scaled(from_preset(preset, base, settings), scale_batch)
        own_knobs = {name: spec.knobs[name] for name in vary}
        prefix = f"{base.id} " if base is not None and len(bases) > 1 else ""
        if base is baseline:
            baseline_id = prefix + id_of(own_knobs)
        # Published figures are of the variant's own settings.
        published, reason = ({}, "") if base is None else published_for(preset, base, spec)
        unpublished = unpublished or reason
        for combination in [
            *([own_knobs] if base is baseline and own_knobs not in combinations else []),
            *combinations,
        ]:
            figures = published if combination == own_knobs else {}
            planned_rows.append(PlannedRow(prefix + id_of(combination), with_knobs(spec, combination), figures))
    return Bench(preset.name, preset.title, baseline_id, tuple(planned_rows), unpublished, tuple(vary))


def id_of(combination: Combination) -> str:
    """Return the id of a row: its settings as they are typed."""
    return " ".join(f"{name}={KNOBS_BY_NAME[name].text_of(value)}" for name, value in combination.items())


def check_count(vary: Vary, bases: int) -> None:
    """Raise UserError with the count and the fewest knobs to drop if there are more than `MAX_ROWS` rows."""
    count = bases * math.prod(map(len, vary.values()))
    dropped, left_rows = fewest_to_drop(vary, count, MAX_ROWS)
    if dropped:
        raise UserError(
            f"the grid has {count:,} rows, more than {MAX_ROWS}",
            key="--vary",
            advice=f"dropping --vary {' and --vary '.join(dropped)}, which leaves {left_rows:,}",
        )


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
