"""A bench: a preset's variants or a grid of settings beside their baseline, run interleaved, as a table.

Runs interleave (A B A B), so that drift of the machine affects every row equally. Every run is a process of its own.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from trainfast_runner.errors import UserError
from trainfast_runner.records.result import Result
from trainfast_runner.results.comparison import (
    BETTER,
    NOISE,
    STRICT_THRESHOLDS,
    WORSE,
    compare,
    paired_interval,
    speeds_rank,
)
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
        combinations = list(combinations_of(vary))
        if base is baseline:
            baseline_id = _row_id(prefix, own_knobs)
            combinations = _with_own(own_knobs, combinations)
        # Published figures are of the variant's own settings.
        published, reason = ({}, "") if base is None else published_for(preset, base, spec)
        unpublished = unpublished or reason
        for combination in combinations:
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
    for combination in _with_own(own_knobs, list(combinations_of(vary))):
        knobs = {**base, **combination}
        spec = RunSpec(preset.name, None, preset.title, model={}, data={}, knobs=knobs, overrides=tuple(knobs))
        rows.append(PlannedRow(_row_id("", combination), spec, {}, partial(plan_script_run, knobs)))
    return Bench(preset.name, preset.title, _row_id("", own_knobs), tuple(rows), varied=tuple(vary))


def _nothing_to_compare(words: str, key: str, name: str) -> UserError:
    return UserError(words, key=key, advice=f"trainfast-tui bench {name} --vary batch_size=8,16")


def _with_own(own_knobs: KnobValues, combinations: list[KnobValues]) -> list[KnobValues]:
    """Return the combinations, after the baseline's own knobs unless those are one of them."""
    return combinations if own_knobs in combinations else [own_knobs, *combinations]


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
    vs_baseline_percent: float | None
    """The gain in samples/s over the baseline, for a row of the same model and samples of the same length."""
    published: Mapping[str, Any]
    ratio: float | None
    """The measured over the published samples/s."""
    diagnosis: str | None = None
    """The rule of the first diagnosis of `result`: what holds the row back; None without any."""
    verdict: str | None = None
    samples_per_s: list[float] = field(default_factory=list)
    """Those of every finished run."""
    interval_percent: tuple[float, float] | None = None
    """95 % CI of the difference from the baseline: from pairs of runs if there are enough repetitions, else from the
    steps of the middle runs."""
    published_vs_baseline_percent: float | None = None
    """The gain of the published figures over the baseline's."""
    knobs: KnobValues = field(default_factory=dict)
    """Every knob as asked for."""

    @property
    def rate(self) -> float | None:
        """Median samples/s of the finished runs; None when none finished."""
        return _median(self.samples_per_s)

    @property
    def peak_bytes(self) -> int | None:
        """The middle run's peak of device memory, else of the worst rank's allocations; None when not measured."""
        memory = self.result.memory if self.result is not None else None
        return (memory.device_peak_used_bytes or memory.peak_allocated_bytes) if memory is not None else None


@dataclass(frozen=True)
class Table:
    """The rows of a bench, as far as they were run."""

    preset: str
    baseline_id: str
    rows: list[Row]
    unpublished: str = ""
    """Why the published figures are left out; empty if they are not."""

    @property
    def baseline_state(self) -> str:
        """The end state of the baseline."""
        return next(row.state for row in self.rows if row.id == self.baseline_id)

    def fields(self) -> dict[str, Any]:
        """Return the object that `bench --json` prints."""
        return {
            "preset": self.preset,
            "baseline": self.baseline_id,
            "rows": self.rows,
            "unpublished": self.unpublished or None,
        }


def needs_no_repeat(row_results: Iterable[RowResult]) -> bool:
    """True if a row need not be repeated: it cannot run here, or does not fit. A device in use may be free later."""
    return any(
        not isinstance(result, DevicesBusy) if isinstance(result, UserError) else result.state == "oom"
        for result in row_results
    )


def tabulate(bench: Bench, results_by_row: Mapping[str, Sequence[RowResult]]) -> Table:
    """Return the table of the runs made so far; their results by row id."""
    baseline = next(row for row in bench.rows if row.id == bench.baseline_id)
    rows = [_row(row, baseline, results_by_row) for row in bench.rows]
    return Table(bench.preset, bench.baseline_id, rows, bench.unpublished)


def _row(planned: PlannedRow, baseline: PlannedRow, results_by_row: Mapping[str, Sequence[RowResult]]) -> Row:
    row_results, baseline_results = (results_by_row.get(row.id, ()) for row in (planned, baseline))
    state, reason = _ending(row_results)
    result, rates = _middle(row_results), _rates(row_results)
    rate, published_rate = _median(rates), _published_rate(planned)
    baseline_published_rate = _published_rate(baseline)
    # A sample of another model, data or length is another amount of work.
    if _work(planned.spec) != _work(baseline.spec):
        baseline_results, baseline_published_rate = (), None
    baseline_middle = _middle(baseline_results)
    gain, verdict, interval = None, None, None
    if planned is baseline:
        gain = 0.0 if rate else None
    elif baseline_middle is not None and result is not None:
        if speeds_rank(baseline_middle, result):
            gain = _percent(rate, _median(_rates(baseline_results)))
        verdict, interval = _compared(baseline_middle, result, baseline_results, row_results)
    return Row(
        id=planned.id,
        state=state,
        reason=reason,
        result=result,
        vs_baseline_percent=gain,
        published=planned.published,
        ratio=rate / published_rate if rate and published_rate else None,
        diagnosis=result.diagnosis[0].rule if result is not None and result.diagnosis else None,
        verdict=verdict,
        samples_per_s=rates,
        interval_percent=interval,
        published_vs_baseline_percent=_percent(published_rate, baseline_published_rate),
        knobs=planned.spec.knobs,
    )


def _work(spec: RunSpec) -> tuple[object, ...]:
    """Everything that decides how much work a sample is."""
    return spec.model, spec.data, spec.knobs.get("seq_len")


def _compared(
    baseline: Result, result: Result, baseline_results: Sequence[RowResult], row_results: Sequence[RowResult]
) -> tuple[str | None, tuple[float, float] | None]:
    """The verdict on a row's throughput and its interval, from the middle runs and from all."""
    if not speeds_rank(baseline, result):
        return STRICT_THRESHOLDS, None
    # The n-th results of all rows come from one repetition, run back to back.
    pairs = [
        (baseline_rate, rate)
        for baseline_run, run in zip(baseline_results, row_results, strict=False)
        if (baseline_rate := _rate(baseline_run)) and (rate := _rate(run))
    ]
    interval = paired_interval(pairs)
    if interval is None:
        row = compare(baseline, result).rows[0]
        return row.verdict, row.interval_percent
    low, high = interval
    # Runs side by side share their conditions, and the pairs show what differed: the interval holds it.
    return (NOISE if low <= 0 <= high else BETTER if low > 0 else WORSE), interval


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


def _middle(row_results: Sequence[RowResult]) -> Result | None:
    """The finished run of middle throughput, the slower of two; if none finished, the last other result; else None."""
    results = [result for result in row_results if isinstance(result, Result)]
    finished = sorted((result for result in results if _rate(result)), key=lambda result: _rate(result) or 0.0)
    if finished:
        return finished[(len(finished) - 1) // 2]
    return results[-1] if results else None


def _rate(result: RowResult) -> float | None:
    """The samples/s of a finished run; None for any other result."""
    if isinstance(result, UserError) or result.state != "finished":
        return None
    return result.throughput.samples_per_s.typical


def _rates(row_results: Sequence[RowResult]) -> list[float]:
    """The samples/s of each finished run."""
    return [rate for rate in map(_rate, row_results) if rate is not None]


def _median(rates: Sequence[float]) -> float | None:
    return statistics.median(rates) if rates else None


def _published_rate(planned: PlannedRow) -> float | None:
    """The samples/s among a row's published figures; None when there are none."""
    rate = planned.published.get("samples_per_s")
    return float(rate) if isinstance(rate, int | float) else None


def _percent(rate: float | None, base: float | None) -> float | None:
    return 100 * (rate / base - 1) if rate and base else None
