"""The rows of `bench --vary`: every combination of the varied values, on top of a preset or of its variants."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from trainfast_runner.errors import UserError
from trainfast_runner.search.bench.variants import Bench, PlannedRow, scaled
from trainfast_runner.search.candidate_spec import with_knobs
from trainfast_runner.settings import presets
from trainfast_runner.settings.knob_values import KnobValue
from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_runner.settings.published import published_for
from trainfast_runner.settings.spec import from_preset
from trainfast_runner.settings.vary import Vary, combinations_of, fewest_to_drop

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
