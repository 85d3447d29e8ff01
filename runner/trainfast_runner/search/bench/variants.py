"""A preset's variants as one table: each trained for real, beside the baseline and its published figures.

Runs interleave (A B A B), so that a machine that warms up or slows down does so for every row alike. A row that cannot
run here is a row with its reason.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainfast_runner.errors import UserError, nearest
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_file import TRIAL
from trainfast_runner.results.comparison.difference import BETTER, NOISE, WORSE, compare
from trainfast_runner.results.comparison.ranking import STRICT_THRESHOLDS, speeds_rank
from trainfast_runner.results.comparison.repeats import paired_interval
from trainfast_runner.running.launch import DevicesBusy
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.settings import presets
from trainfast_runner.settings.knob_type import KnobValues, whole_number
from trainfast_runner.settings.published import published_for
from trainfast_runner.settings.spec import RunSpec, from_preset

REFUSED = "refused"
"""State of a row that this machine or training Python cannot run at all."""
NOT_RUN = "not_run"
"""State of a row whose device another run had taken, or that the bench did not reach before it was stopped."""
Outcome = Result | UserError
NO_GROUPS: Mapping[str, str] = {}


@dataclass(frozen=True)
class Entry:
    """One row to be run."""

    id: str
    spec: RunSpec
    published: Mapping[str, Any]
    plan: Callable[[], RunPlan] | None = None
    """Plans a row of a user's own script; None for a preset's. Raises UserError."""


@dataclass(frozen=True)
class Bench:
    """The rows to be run; `baseline` is the id of one of the entries."""

    preset: str
    title: str
    baseline: str
    entries: tuple[Entry, ...]
    unpublished: str = ""
    """Why the published figures are left out; empty if they are not."""
    varied: tuple[str, ...] = ()
    """The knobs of `--vary`, whose values are in the ids."""


@dataclass(frozen=True)
class Row:
    """One row of the table. `result` is its middle run's, by throughput.

    `vs_baseline_percent` is how much more samples a second than the baseline, for a row that trains the same model on
    samples of the same length; `published_vs_baseline_percent` is that of the published figures. `ratio` is the
    measured over the published samples a second; `samples_per_s` holds every finished run's.
    """

    id: str
    state: str
    reason: str
    result: Result | None
    vs_baseline_percent: float | None
    published: Mapping[str, Any]
    ratio: float | None
    verdict: str | None = None
    samples_per_s: list[float] = field(default_factory=list)
    interval_percent: tuple[float, float] | None = None
    """95 % CI of the difference from the baseline: from pairs of runs if there are enough repetitions, else from the
    steps of the middle runs."""
    published_vs_baseline_percent: float | None = None
    knobs: KnobValues = field(default_factory=dict)
    """Every knob as asked for."""
    warm: bool | None = None
    """True if it was trained in a process that trained other rows too; None without a result."""

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
    baseline: str
    rows: list[Row]
    unpublished: str = ""
    """Why the published figures are left out; empty if they are not."""

    @property
    def baseline_state(self) -> str:
        """The end state of the baseline."""
        return next(row.state for row in self.rows if row.id == self.baseline)

    def fields(self) -> dict[str, Any]:
        """The object that `bench --json` prints."""
        return {
            "preset": self.preset,
            "baseline": self.baseline,
            "rows": self.rows,
            "unpublished": self.unpublished or None,
        }


def prepare(reference: str, settings: Sequence[str] = (), scale_batch: float = 1.0) -> Bench:
    """Return the rows of PRESET, or for NAME/VARIANT that one and the baseline, with every setting applied.

    `scale_batch` multiplies each row's batch_size, which stays at least 1. Raises UserError.
    """
    preset, chosen = presets.load(reference)
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
    entries = []
    reasons = []
    for variant in preset.variants:
        if chosen is None or variant.id in (chosen.id, baseline.id):
            spec = from_preset(preset, variant, settings)
            published, reason = published_for(preset, variant, spec)
            entries.append(Entry(variant.id, scaled(spec, scale_batch), published))
            reasons.append(reason)
    return Bench(preset.name, preset.title, baseline.id, tuple(entries), next(filter(None, reasons), ""))


def scaled(spec: RunSpec, factor: float) -> RunSpec:
    """The run with its batch_size multiplied by `factor`, at least 1."""
    if factor == 1.0:
        return spec
    return spec.with_overrides(batch_size=max(1, round(whole_number(spec.knobs, "batch_size") * factor)))


def run_order(bench: Bench, repeat: int, groups: Mapping[str, str] = NO_GROUPS) -> Iterator[tuple[int, Entry]]:
    """Yield every run as (repetition from 1, row): the baseline first in each, rows of one group after each other."""
    ordered = sorted(bench.entries, key=lambda entry: entry.id != bench.baseline)
    first = {groups.get(entry.id, entry.id): -index for index, entry in enumerate(reversed(ordered))}
    ordered.sort(key=lambda entry: first[groups.get(entry.id, entry.id)])
    for repetition in range(1, repeat + 1):
        for entry in ordered:
            yield repetition, entry


def again_is_pointless(outcomes: Iterable[Outcome]) -> bool:
    """True if a row need not be repeated: it cannot run here, or does not fit. A device in use may be free later."""
    return any(
        not isinstance(outcome, DevicesBusy) if isinstance(outcome, UserError) else outcome.state == "oom"
        for outcome in outcomes
    )


def tabulate(bench: Bench, outcomes: Mapping[str, Sequence[Outcome]]) -> Table:
    """Return the table of the runs made so far; `outcomes` by row id."""
    first = next(entry for entry in bench.entries if entry.id == bench.baseline)
    base = outcomes.get(bench.baseline, ())
    rows = [_row(entry, outcomes.get(entry.id, ()), first, base) for entry in bench.entries]
    return Table(bench.preset, bench.baseline, rows, bench.unpublished)


def _has_variants(name: str) -> bool:
    try:
        return bool(presets.load(name)[0].variants)
    except UserError:
        return False


def _row(entry: Entry, outcomes: Sequence[Outcome], first: Entry, base_outcomes: Sequence[Outcome]) -> Row:
    state, reason = _ending(outcomes)
    result = _middle(outcomes)
    rates = _rates(outcomes)
    rate = _median(rates)
    is_baseline = entry.id == first.id
    published, published_base = _published_rate(entry.published), _published_rate(first.published)
    if not _same_work(entry.spec, first.spec):
        base_outcomes, published_base = (), None
    base = _middle(base_outcomes)
    comparable = base is not None and result is not None and speeds_rank(base, result)
    base_rate = _median(_rates(base_outcomes)) if comparable else None
    verdict, interval = (None, None) if is_baseline else _compared(base, result, base_outcomes, outcomes)
    return Row(
        id=entry.id,
        state=state,
        reason=reason,
        result=result,
        vs_baseline_percent=0.0 if is_baseline and rate else _percent(rate, base_rate),
        published=entry.published,
        ratio=rate / published if rate and published else None,
        verdict=verdict,
        samples_per_s=rates,
        interval_percent=interval,
        published_vs_baseline_percent=_percent(published, published_base),
        knobs=entry.spec.knobs,
        warm=None if result is None else result.role == TRIAL,
    )


def _same_work(spec: RunSpec, baseline: RunSpec) -> bool:
    """True if a sample of one is as much work as a sample of the other."""
    same_data = (spec.data, spec.knobs.get("seq_len")) == (baseline.data, baseline.knobs.get("seq_len"))
    return spec.model == baseline.model and same_data


def _compared(
    base: Result | None, result: Result | None, base_outcomes: Sequence[Outcome], outcomes: Sequence[Outcome]
) -> tuple[str | None, tuple[float, float] | None]:
    """The verdict on a row's throughput and its interval; None for both without two results."""
    if base is None or result is None:
        return None, None
    if not speeds_rank(base, result):
        return STRICT_THRESHOLDS, None
    # The n-th outcome of every row is of the n-th repetition: they followed each other.
    pairs = [
        (base_rate, rate)
        for base_outcome, outcome in zip(base_outcomes, outcomes, strict=False)
        if isinstance(base_outcome, Result) and isinstance(outcome, Result)
        if (base_rate := _rate(base_outcome)) and (rate := _rate(outcome))
    ]
    interval = paired_interval(pairs)
    if interval is None:
        row = compare(base, result).rows[0]
        return row.verdict, row.interval_percent
    low, high = interval
    return (NOISE if low <= 0 <= high else BETTER if low > 0 else WORSE), interval


def _ending(outcomes: Sequence[Outcome]) -> tuple[str, str]:
    """State and reason of a row: of its first run that did not finish, else of the last one.

    A repetition that found its device in use counts only if no other was run.
    """
    busy = [outcome for outcome in outcomes if isinstance(outcome, DevicesBusy)]
    ran = [outcome for outcome in outcomes if not isinstance(outcome, DevicesBusy)]
    if not ran:
        return NOT_RUN, busy[-1].line() if busy else "the bench was stopped before it"
    for outcome in ran:
        if isinstance(outcome, UserError):
            return REFUSED, outcome.line()
        if outcome.state != "finished":
            return outcome.state, outcome.reason
    last = ran[-1]
    return (last.state, last.reason) if isinstance(last, Result) else (REFUSED, last.line())


def _middle(outcomes: Sequence[Outcome]) -> Result | None:
    """The finished run of middle throughput, the slower of two; if none finished, the last other result; else None."""
    results = [outcome for outcome in outcomes if isinstance(outcome, Result)]
    finished = sorted((result for result in results if _rate(result)), key=lambda result: _rate(result) or 0.0)
    if finished:
        return finished[(len(finished) - 1) // 2]
    return results[-1] if results else None


def _rate(result: Result) -> float | None:
    return result.throughput.samples_per_s.median if result.state == "finished" else None


def _rates(outcomes: Sequence[Outcome]) -> list[float]:
    """The samples/s of each finished run."""
    rates = [_rate(outcome) for outcome in outcomes if isinstance(outcome, Result)]
    return [rate for rate in rates if rate is not None]


def _median(rates: Sequence[float]) -> float | None:
    return statistics.median(rates) if rates else None


def _percent(rate: float | None, base: float | None) -> float | None:
    return 100 * (rate / base - 1) if rate and base else None


def _published_rate(published: Mapping[str, Any]) -> float | None:
    """The samples/s among a row's published figures; None when there are none."""
    rate = published.get("samples_per_s")
    return float(rate) if isinstance(rate, int | float) else None
