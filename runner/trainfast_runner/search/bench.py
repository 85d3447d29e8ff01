"""A bench: a preset's variants or a grid of settings beside their baseline, run interleaved, as a table.

Runs interleave (A B A B), so that drift of the machine affects every row equally. Every run is a process of its own.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from trainfast_runner.errors import UserError
from trainfast_runner.records.result import Result
from trainfast_runner.results import comparison
from trainfast_runner.running.planning import DevicesBusy, RunPlan
from trainfast_runner.search.searches import script_planner, value_text, with_knobs
from trainfast_runner.settings import presets
from trainfast_runner.settings.knob_values import KnobValue, KnobValues, whole_number
from trainfast_runner.settings.knobs import Vary, combinations_of, fewest_to_drop, knob, setting_of
from trainfast_runner.settings.script_preset import ScriptPreset
from trainfast_runner.settings.spec import SET_BY_A_BATCH_SEARCH, RunSpec, from_preset, published_for

MAX_ROWS = 200
"""The most rows of a grid; 200 runs of a quarter of a minute take 50 minutes."""
AS_IT_IS_ID = "as it is"
"""The baseline's id where the preset of a script sets none of the varied knobs."""
REFUSED = "refused"
"""State of a row that this machine or training Python cannot run."""
NOT_RUN = "not_run"
"""State of a row whose device was in use, or that a stopped bench did not reach."""
RowResult = Result | UserError
"""The result of one run of a row, or the error that kept it from running."""


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


def prepare(reference: str, settings: Sequence[str] = (), scale_batch: float = 1.0, vary: Vary | None = None) -> Bench:
    """Return the rows of PRESET: every variant with each combination of the varied values.

    Without varied values NAME/VARIANT has its preset's baseline beside it; with them the baseline is NAME/VARIANT, or
    the preset's baseline, at its own settings, in a row of its own unless the grid has it. `scale_batch` multiplies
    each row's batch_size, which stays at least 1. Raises UserError.
    """
    preset, chosen_variant = presets.load(reference)
    vary = vary or {}
    baseline = chosen_variant if chosen_variant is not None and vary else preset.baseline_variant
    if baseline is None and not vary:
        raise _nothing_to_compare(f"preset {preset.name} has no variants to compare", reference, preset.name)
    if scale_batch != 1.0 and "batch_size" in vary:
        raise UserError("--scale-batch would change the sizes of --vary batch_size", key="--scale-batch")
    chosen = () if chosen_variant is None else (chosen_variant, baseline)
    variants = [variant for variant in preset.variants if not chosen or variant in chosen]
    bases: list[presets.Variant | None] = [*variants] or [None]
    _check_count(vary, len(bases))
    planned_rows: list[PlannedRow] = []
    baseline_id = unpublished = ""
    for base in bases:
        spec = from_preset(preset, base, settings)
        if scale_batch != 1.0:
            batch_size = round(whole_number(spec.knobs, "batch_size") * scale_batch)
            spec = spec.with_overrides(batch_size=max(1, batch_size))
        prefix = base.id if base is not None and (len(bases) > 1 or not vary) else ""
        own_knobs = {name: spec.knobs[name] for name in vary}
        if base is baseline:
            baseline_id = _row_id(prefix, own_knobs)
        # Published figures are of the variant's own settings.
        published, reason = ({}, "") if base is None else published_for(preset, base, spec)
        unpublished = unpublished or reason
        for combination in _combinations(vary, own_knobs if base is baseline else None):
            figures = published if combination == own_knobs else {}
            planned_rows.append(PlannedRow(_row_id(prefix, combination), with_knobs(spec, combination), figures))
    return Bench(preset.name, preset.title, baseline_id, tuple(planned_rows), unpublished, tuple(vary))


def prepare_script(preset: ScriptPreset, vary: Vary, settings: Sequence[str], python: str | None) -> Bench:
    """Return a row for each combination of the varied values; the baseline is the script at the preset's own.

    Raises UserError without varied values, and for too many rows.
    """
    if not vary:
        raise _nothing_to_compare(f"{preset.name} is a script: name the values to compare", "--vary", preset.name)
    _check_count(vary, 1)
    base = {"steps": knob("steps").default, **preset.knobs, **dict(setting_of(setting) for setting in settings)}
    own_knobs = {name: base[name] for name in vary if name in base}
    plan_script_run = script_planner(preset, settings, python, SET_BY_A_BATCH_SEARCH)
    rows = []
    for combination in _combinations(vary, own_knobs):
        knobs = {**base, **combination}
        spec = RunSpec(preset.name, None, preset.title, model={}, data={}, knobs=knobs, overrides=tuple(knobs))
        rows.append(PlannedRow(_row_id("", combination), spec, {}, partial(plan_script_run, knobs)))
    return Bench(preset.name, preset.title, _row_id("", own_knobs), tuple(rows), varied=tuple(vary))


def _nothing_to_compare(words: str, key: str, name: str) -> UserError:
    return UserError(words, key=key, advice=f"trainfast-tui bench {name} --vary batch_size=8,16")


def _combinations(vary: Vary, own_knobs: KnobValues | None) -> list[KnobValues]:
    """Return the combinations of the varied values, after the baseline's own knobs unless those are one of them."""
    combinations = list(combinations_of(vary))
    return combinations if own_knobs is None or own_knobs in combinations else [own_knobs, *combinations]


def _row_id(prefix: str, combination: Mapping[str, KnobValue]) -> str:
    """Return the id of a row: its variant and its settings as they are typed."""
    typed = [f"{name}={value_text(name, value)}" for name, value in combination.items()]
    return " ".join([prefix, *typed] if prefix else typed) or AS_IT_IS_ID


def _check_count(vary: Vary, bases: int) -> None:
    """Raise UserError with the count and the fewest knobs to drop if there are more than `MAX_ROWS` rows."""
    count = bases * math.prod(map(len, vary.values()))
    dropped, left_rows = fewest_to_drop(vary, count, MAX_ROWS)
    if dropped:
        advice = f"dropping --vary {' and --vary '.join(dropped)}, which leaves {left_rows:,}"
        raise UserError(f"the grid has {count:,} rows, more than {MAX_ROWS}", key="--vary", advice=advice)


def run_order(bench: Bench, repeat: int) -> list[PlannedRow]:
    """Return the row of every run, the baseline first in each repetition."""
    return sorted(bench.rows, key=lambda row: row.id != bench.baseline_id) * repeat


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    id: str
    state: str
    reason: str
    result: Result | None
    """The result of the middle run by throughput; None without a run."""
    samples_per_s: list[float]
    """Those of every finished run."""
    published: Mapping[str, Any]
    ratio: float | None
    """The measured over the published samples/s."""
    diagnosis: str | None
    """The rule of the first diagnosis of `result`: what holds the row back; None without any."""
    knobs: KnobValues
    """Every knob as asked for."""
    vs_baseline_percent: float | None = None
    """The gain in samples/s over the baseline, for a row of the same model and samples of the same length."""
    verdict: str | None = None
    interval_percent: tuple[float, float] | None = None
    """95 % CI of the difference from the baseline: from pairs of runs if there are enough repetitions, else from the
    steps of the middle runs."""
    published_vs_baseline_percent: float | None = None
    """The gain of the published figures over the baseline's."""

    @property
    def rate(self) -> float | None:
        """Median samples/s of the finished runs; None when none finished."""
        return statistics.median(self.samples_per_s) if self.samples_per_s else None

    @property
    def peak_bytes(self) -> int | None:
        """The middle run's peak of device memory, else of the worst rank's allocations; None when not measured."""
        memory = self.result.memory if self.result is not None else None
        return (memory.device_peak_used_bytes or memory.peak_allocated_bytes) if memory is not None else None


@dataclass(frozen=True)
class Table:
    """The rows of a bench, as far as they were run."""

    bench: Bench
    rows: list[Row]

    def fields(self) -> dict[str, Any]:
        """Return the object that `bench --json` prints."""
        bench = self.bench
        unpublished = bench.unpublished or None
        return {"preset": bench.preset, "baseline": bench.baseline_id, "rows": self.rows, "unpublished": unpublished}


def needs_no_repeat(row_results: Iterable[RowResult]) -> bool:
    """True if a row need not be repeated: it cannot run here, or does not fit. A device in use may be free later."""
    return any(
        not isinstance(result, DevicesBusy) if isinstance(result, UserError) else result.state == "oom"
        for result in row_results
    )


def tabulate(bench: Bench, results_by_row: Mapping[str, Sequence[RowResult]]) -> Table:
    """Return the table of the runs made so far; their results by row id."""
    rows = {planned.id: _row(planned, results_by_row.get(planned.id, ())) for planned in bench.rows}
    works = {planned.id: _work(planned.spec) for planned in bench.rows}
    baseline = rows[bench.baseline_id]
    for row in rows.values():
        # A sample of another model, data or length is another amount of work.
        if works[row.id] == works[baseline.id]:
            # The n-th results of all rows come from one repetition, run back to back.
            repetitions = zip(*(map(_rate, results_by_row.get(one, ())) for one in (baseline.id, row.id)), strict=False)
            rows[row.id] = _compared(row, baseline, [(base, rate) for base, rate in repetitions if base and rate])
    return Table(bench, list(rows.values()))


def _row(planned: PlannedRow, row_results: Sequence[RowResult]) -> Row:
    """Return a row that is compared with no other. Its result is the finished run of middle rate, the slower of two."""
    results = [result for result in row_results if isinstance(result, Result)]
    finished = sorted((result for result in results if _rate(result)), key=lambda result: _rate(result) or 0.0)
    result = finished[(len(finished) - 1) // 2] if finished else results[-1] if results else None
    state, reason = _ending(row_results)
    row = Row(
        id=planned.id,
        state=state,
        reason=reason,
        result=result,
        samples_per_s=[rate for rate in map(_rate, row_results) if rate is not None],
        published=planned.published,
        ratio=None,
        diagnosis=result.diagnosis[0].rule if result is not None and result.diagnosis else None,
        knobs=planned.spec.knobs,
    )
    published_rate = _published_rate(row)
    return replace(row, ratio=row.rate / published_rate if row.rate and published_rate else None)


def _work(spec: RunSpec) -> tuple[object, ...]:
    """Everything that decides how much work a sample is."""
    return spec.model, spec.data, spec.knobs.get("seq_len")


def _compared(row: Row, baseline: Row, pairs: Sequence[tuple[float, float]]) -> Row:
    """Return the row with its gain over the baseline; `pairs` are their rates in each repetition."""
    row = replace(row, published_vs_baseline_percent=_gain(_published_rate(row), _published_rate(baseline)))
    gain = _gain(row.rate, baseline.rate)
    if row.id == baseline.id:
        return replace(row, vs_baseline_percent=gain)
    if baseline.result is None or row.result is None:
        return row
    if not comparison.speeds_rank(baseline.result, row.result):
        return replace(row, verdict=comparison.STRICT_THRESHOLDS)
    interval = comparison.paired_interval(pairs)
    if interval is None:
        compared = comparison.compare(baseline.result, row.result).rows[0]
        verdict, interval = compared.verdict, compared.interval_percent
    else:
        # Runs side by side share their conditions, and the pairs show what differed: the interval holds it.
        verdict = comparison.BETTER if interval[0] > 0 else comparison.WORSE
        if interval[0] <= 0 <= interval[1]:
            verdict = comparison.NOISE
    return replace(row, vs_baseline_percent=gain, verdict=verdict, interval_percent=interval)


def _ending(row_results: Sequence[RowResult]) -> tuple[str, str]:
    """State and reason of a row: of its first run that did not finish, else of the last one.

    A repetition that found its device in use counts only if no other was run.
    """
    ran = [result for result in row_results if not isinstance(result, DevicesBusy)]
    for result in ran:
        if isinstance(result, UserError):
            return REFUSED, result.line()
        if result.state != "finished" or result is ran[-1]:
            return result.state, result.reason
    busy = [result for result in row_results if isinstance(result, DevicesBusy)]
    return NOT_RUN, busy[-1].line() if busy else "the bench was stopped before it"


def _rate(result: RowResult) -> float | None:
    """The samples/s of a finished run; None for any other result."""
    if isinstance(result, UserError) or result.state != "finished":
        return None
    return result.throughput.samples_per_s.typical


def _published_rate(row: Row) -> float | None:
    """The samples/s among a row's published figures; None when there are none."""
    rate = row.published.get("samples_per_s")
    return float(rate) if isinstance(rate, int | float) else None


def _gain(rate: float | None, base: float | None) -> float | None:
    """The gain of a rate over another, in percent."""
    return 100 * (rate / base - 1) if rate and base else None
