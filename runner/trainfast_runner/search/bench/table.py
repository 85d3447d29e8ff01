"""The table of a bench from the results of its runs: each row beside the baseline and its published figures."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
from trainfast_runner.running.planning import DevicesBusy
from trainfast_runner.search.bench.rows import Bench, PlannedRow
from trainfast_runner.settings.knob_values import KnobValues
from trainfast_runner.settings.spec import RunSpec
from trainfast_runner.worker.shared.words import TRIAL

REFUSED = "refused"
"""State of a row that this machine or training Python cannot run."""
NOT_RUN = "not_run"
"""State of a row whose device was in use, or that a stopped bench did not reach."""
RowResult = Result | UserError
"""The result of one run of a row, or the error that kept it from running."""


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
    warm: bool | None = None
    """True if the row was trained in a process that trained other rows too; None without a result."""

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
    baseline_results = results_by_row.get(bench.baseline_id, ())
    rows = [_row(row, results_by_row.get(row.id, ()), baseline, baseline_results) for row in bench.rows]
    return Table(bench.preset, bench.baseline_id, rows, bench.unpublished)


def _row(
    planned_row: PlannedRow,
    row_results: Sequence[RowResult],
    baseline: PlannedRow,
    baseline_results: Sequence[RowResult],
) -> Row:
    state, reason = _ending(row_results)
    result, rates = _middle(row_results), _rates(row_results)
    rate = _median(rates)
    published_rate = _published_rate(planned_row.published)
    is_baseline = planned_row.id == baseline.id
    baseline_published_rate = _published_rate(baseline.published)
    if not _same_work(planned_row.spec, baseline.spec):
        baseline_results, baseline_published_rate = (), None
    baseline_middle = _middle(baseline_results)
    is_comparable = baseline_middle is not None and result is not None and speeds_rank(baseline_middle, result)
    baseline_rate = _median(_rates(baseline_results)) if is_comparable else None
    verdict, interval = (
        (None, None) if is_baseline else _compared(baseline_middle, result, baseline_results, row_results)
    )
    return Row(
        id=planned_row.id,
        state=state,
        reason=reason,
        result=result,
        vs_baseline_percent=0.0 if is_baseline and rate else _percent(rate, baseline_rate),
        published=planned_row.published,
        ratio=rate / published_rate if rate and published_rate else None,
        diagnosis=result.diagnosis[0].rule if result is not None and result.diagnosis else None,
        verdict=verdict,
        samples_per_s=rates,
        interval_percent=interval,
        published_vs_baseline_percent=_percent(published_rate, baseline_published_rate),
        knobs=planned_row.spec.knobs,
        warm=None if result is None else result.role == TRIAL,
    )


def _same_work(spec: RunSpec, baseline: RunSpec) -> bool:
    """True if a sample of one is as much work as a sample of the other."""
    same_data = (spec.data, spec.knobs.get("seq_len")) == (baseline.data, baseline.knobs.get("seq_len"))
    return spec.model == baseline.model and same_data


def _compared(
    baseline: Result | None,
    result: Result | None,
    baseline_results: Sequence[RowResult],
    row_results: Sequence[RowResult],
) -> tuple[str | None, tuple[float, float] | None]:
    """The verdict on a row's throughput and its interval; None for both without two results."""
    if baseline is None or result is None:
        return None, None
    if not speeds_rank(baseline, result):
        return STRICT_THRESHOLDS, None
    # The n-th results of all rows come from one repetition, run back to back.
    pairs = [
        (baseline_rate, rate)
        for baseline_run, run in zip(baseline_results, row_results, strict=False)
        if isinstance(baseline_run, Result) and isinstance(run, Result)
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
    busy = [result for result in row_results if isinstance(result, DevicesBusy)]
    ran = [result for result in row_results if not isinstance(result, DevicesBusy)]
    if not ran:
        return NOT_RUN, busy[-1].line() if busy else "the bench was stopped before it"
    results: list[Result] = []
    for result in ran:
        if isinstance(result, UserError):
            return REFUSED, result.line()
        if result.state != "finished":
            return result.state, result.reason
        results.append(result)
    return "finished", results[-1].reason


def _middle(row_results: Sequence[RowResult]) -> Result | None:
    """The finished run of middle throughput, the slower of two; if none finished, the last other result; else None."""
    results = [result for result in row_results if isinstance(result, Result)]
    finished = sorted((result for result in results if _rate(result)), key=lambda result: _rate(result) or 0.0)
    if finished:
        return finished[(len(finished) - 1) // 2]
    return results[-1] if results else None


def _rate(result: Result) -> float | None:
    return result.throughput.samples_per_s.typical if result.state == "finished" else None


def _rates(row_results: Sequence[RowResult]) -> list[float]:
    """The samples/s of each finished run."""
    rates = [_rate(result) for result in row_results if isinstance(result, Result)]
    return [rate for rate in rates if rate is not None]


def _median(rates: Sequence[float]) -> float | None:
    return statistics.median(rates) if rates else None


def _percent(rate: float | None, base: float | None) -> float | None:
    return 100 * (rate / base - 1) if rate and base else None


def _published_rate(published: Mapping[str, Any]) -> float | None:
    """The samples/s among a row's published figures; None when there are none."""
    rate = published.get("samples_per_s")
    return float(rate) if isinstance(rate, int | float) else None
