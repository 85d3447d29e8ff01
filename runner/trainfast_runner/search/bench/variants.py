"""The rows of a bench: a preset's variants beside their baseline, and the order in which they are run.

Runs interleave (A B A B), so that drift of the machine affects every row equally.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainfast_runner.errors import UserError, nearest
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.settings import presets
from trainfast_runner.settings.knob_type import whole_number
from trainfast_runner.settings.published import published_for
from trainfast_runner.settings.spec import RunSpec, from_preset


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
