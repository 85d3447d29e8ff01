"""Two runs side by side: differing settings, figures, and the significance of each difference.

Each phase of a step is compared by its own spread, and must also differ by half a percent of the step. Results of older
versions hold the spread of throughput alone: their phases are compared by the spread of the whole step. Figures without
a spread (peak memory, energy) must differ by `significance.RUN_TO_RUN`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainfast_runner.records.result import MIN_STEPS_TO_COMPARE, Doubt, Result
from trainfast_runner.records.roles import WARM_ROLES
from trainfast_runner.records.run_states import state_text
from trainfast_runner.results.comparison.conditions import ConditionRow, compared_conditions
from trainfast_runner.results.comparison.ranking import (
    DIFFERENT_BATCH,
    DIFFERENT_DEVICES,
    DIFFERENT_SAMPLE_VERDICTS,
    DIFFERENT_SEQ_LEN,
    DIFFERENT_STEPS,
    STRICT_THRESHOLDS,
    run_knobs,
    section_overrides,
    speeds_rank,
    unlike_work_verdict,
    watched_differently,
)
from trainfast_runner.results.comparison.significance import (
    ERRORS_APART,
    is_significant,
    median_error,
    ratio_interval,
    relative_noise,
)
from trainfast_runner.results.doubts import doubts, qualifications, watched_text
from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_runner.worker.shared.phases import STEP_PHASES
from trainfast_runner.worker.shared.search_roles import PROBE

BETTER, WORSE = "better", "worse"
DOUBTFUL = "doubtful"
"""The verdict on figures of time and energy if a doubt touches either run, or their conditions differed."""
NOISE = "no significant difference"
CHANGED = "changed"
UNKNOWN = "not measured in both"
MIN_STEP_SHARE = 0.005
"""Chosen, not measured: least share of the step that a difference of a phase must have to count."""
MIN_DIFFERENCE_BYTES = 2 << 20
"""Chosen, not measured: least difference of memory that counts: CUDA's caching allocator hands out blocks of 2 MiB."""


@dataclass(frozen=True)
class ComparisonRow:
    """One figure of both runs."""

    label: str
    unit: str
    """samples/s, tokens/s, ms, bytes, J or empty."""
    a: float | None
    b: float | None
    delta: float | None
    """b - a in that unit."""
    percent: float | None
    verdict: str
    """better, worse, doubtful, changed (neither is better), "no significant difference" or "not measured in both"; for
    figures that do not rank, one of the verdicts of `ranking`."""
    interval_percent: tuple[float, float] | None = None
    """95 % confidence interval of the difference, in percent of a."""


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side."""

    a: str
    b: str
    knobs: list[tuple[str, Any, Any]]
    """The differing knobs as (name, a, b), then the differing overrides of model and data (None: the preset's
    value)."""
    rows: list[ComparisonRow]
    notes: list[str]
    """Sentences on what makes the figures less comparable."""
    conditions: list[ConditionRow]
    """Conditions that are known of either run."""
    doubts: list[Doubt]
    """Those of run A, those of run B, and the conditions in which the two differed."""


def compare(a: Result, b: Result) -> Comparison:
    """The difference of `b` from `a`."""
    conditions = compared_conditions(a, b)
    found = list(_doubts(a, b, conditions))
    rows = _Rows(a, b, is_doubtful=bool(found))
    return Comparison(
        a.run_id, b.run_id, _differing_settings(a, b), list(rows.all()), list(_notes(a, b)), conditions, found
    )


def _doubts(a: Result, b: Result, conditions: Sequence[ConditionRow]) -> Iterator[Doubt]:
    for letter, result in (("A", a), ("B", b)):
        for doubt in doubts(result):
            yield Doubt(kind=doubt.kind, text=f"{letter} {doubt.text}")
    if differing := [row.label for row in conditions if row.differs]:
        text = f"the conditions differed ({', '.join(differing)}): part of the difference may come from them"
        yield Doubt(kind="other_conditions", text=text)


def _differing_settings(a: Result, b: Result) -> list[tuple[str, Any, Any]]:
    knobs_a, knobs_b = ({**run_knobs(result), **section_overrides(result), **_tried_batch(result)} for result in (a, b))
    names = dict.fromkeys([*KNOBS_BY_NAME, *a.knobs, *b.knobs, *knobs_a, *knobs_b])
    if "auto" in (knobs_a.get("attention"), knobs_b.get("attention")) and a.actual.attention == b.actual.attention:
        # sdpa was the default once, so the same kernel may be named or left open.
        names.pop("attention", None)
    return [(name, knobs_a.get(name), knobs_b.get(name)) for name in names if knobs_a.get(name) != knobs_b.get(name)]


def _tried_batch(result: Result) -> dict[str, Any]:
    """The batch size of a run; of a search's probe the last one it tried."""
    return {"batch_size": result.tried[-1]} if result.tried else {}


class _Rows:
    """The rows of two runs, and the facts that they share: the noise of a step, and the figures that rank."""

    def __init__(self, a: Result, b: Result, *, is_doubtful: bool) -> None:
        self._a, self._b = a, b
        self._doubtful = DOUBTFUL if is_doubtful else None
        self._noise = relative_noise(a, b)
        work_verdict = unlike_work_verdict(a, b)
        self._different_samples = work_verdict if work_verdict in DIFFERENT_SAMPLE_VERDICTS else None
        self._is_different_batch = work_verdict == DIFFERENT_BATCH
        self._unranked = self._different_samples if speeds_rank(a, b) else STRICT_THRESHOLDS
        """The verdict on samples/s that do not rank."""
        self._unranked_steps = self._unranked or work_verdict

    def all(self) -> Iterator[ComparisonRow]:
        """Every row, in the order in which they are shown."""
        yield from self._speed()
        yield from self._phases()
        yield from self._memory()
        yield self._energy()
        yield self._loss()

    def _speed(self) -> Iterator[ComparisonRow]:
        a, b = self._a.throughput, self._b.throughput
        yield self._speed_row(
            "throughput", "samples/s", a.samples_per_s.typical, b.samples_per_s.typical, self._unranked
        )
        if a.predicted or b.predicted:
            value_a, value_b = (rates.predicted.median if rates.predicted else None for rates in (a, b))
            yield _row("throughput predicted", "samples/s", value_a, value_b, more_is_better=None)
        # Tokens of another length are the same work.
        unranked = None if self._unranked == DIFFERENT_SEQ_LEN else self._unranked
        yield self._speed_row("token throughput", "tokens/s", a.tokens_per_s.typical, b.tokens_per_s.typical, unranked)
        yield self._speed_row("step", "ms", self._a.step_ms.p50, self._b.step_ms.p50, self._unranked_steps)

    def _speed_row(
        self, label: str, unit: str, value_a: float | None, value_b: float | None, verdict: str | None
    ) -> ComparisonRow:
        row = _row(label, unit, value_a, value_b, self._noise, more_is_better=unit != "ms")
        # Steps of another batch do not rank, but their difference has an interval.
        interval = None if verdict is not None and self._unranked else ratio_interval(value_a, value_b, self._noise)
        return _with_verdict(replace(row, interval_percent=interval), verdict or self._doubtful)

    def _phases(self) -> Iterator[ComparisonRow]:
        for name in STEP_PHASES:
            row = _phase_row(name, self._a, self._b) or self._phase_by_step(name)
            yield _with_verdict(row, self._unranked_steps or self._doubtful)

    def _phase_by_step(self, name: str) -> ComparisonRow:
        """The row of a phase held against the spread of the whole step."""
        a, b = self._a.step_ms, self._b.step_ms
        noise_ms = math.inf
        if self._noise is not None and a.p50 is not None and b.p50 is not None:
            noise_ms = self._noise * max(a.p50, b.p50)
        return _row(f"step: {name}", "ms", getattr(a, name), getattr(b, name), least=noise_ms)

    def _memory(self) -> Iterator[ComparisonRow]:
        a, b = self._a.memory, self._b.memory
        yield self._memory_row("peak allocated", a.peak_allocated_bytes, b.peak_allocated_bytes)
        yield _row("peak predicted", "bytes", a.predicted_bytes, b.predicted_bytes, more_is_better=None)
        yield self._memory_row("peak reserved", a.peak_reserved_bytes, b.peak_reserved_bytes)
        yield self._memory_row("device peak", a.device_peak_used_bytes, b.device_peak_used_bytes)

    def _memory_row(self, label: str, value_a: int | None, value_b: int | None) -> ComparisonRow:
        # Another batch or model takes other memory: neither is the better one for it.
        more_is_better = None if self._different_samples or self._is_different_batch else False
        return _row(label, "bytes", value_a, value_b, least=MIN_DIFFERENCE_BYTES, more_is_better=more_is_better)

    def _energy(self) -> ComparisonRow:
        unranked = self._different_samples or (DIFFERENT_DEVICES if watched_differently(self._a, self._b) else None)
        row = _row("energy a sample", "J", self._a.energy.joules_per_sample, self._b.energy.joules_per_sample)
        return _with_verdict(row, unranked or self._doubtful)

    def _loss(self) -> ComparisonRow:
        steps, other_steps = (result.steps.warmup + result.steps.measured for result in (self._a, self._b))
        row = _row("last loss", "", self._a.loss.last, self._b.loss.last, more_is_better=None)
        return _with_verdict(row, None if steps == other_steps else DIFFERENT_STEPS)


def _phase_row(name: str, a: Result, b: Result) -> ComparisonRow | None:
    """The row of a phase by its own spread; None when a result does not hold that, or has too few steps."""
    values, errors, steps = [], [], []
    for result in (a, b):
        value, mad, step = getattr(result.step_ms, name), result.step_ms.mad.get(name), result.step_ms.p50
        if value is None or mad is None or step is None or result.steps.measured < MIN_STEPS_TO_COMPARE:
            return None
        values.append(value)
        errors.append(median_error(mad, result.steps.measured))
        steps.append(step)
    value_a, value_b = values
    least_ms = MIN_STEP_SHARE * max(steps)
    if value_a <= 0 or value_b <= 0:
        # Without a ratio to take a logarithm of, the milliseconds themselves are compared.
        least_ms = max(least_ms, ERRORS_APART * math.hypot(*errors))
        return _row(f"step: {name}", "ms", value_a, value_b, least=least_ms)
    noise = ERRORS_APART * math.hypot(errors[0] / value_a, errors[1] / value_b)
    noise = max(noise, math.log1p(least_ms / max(value_a, value_b)))
    row = _row(f"step: {name}", "ms", value_a, value_b, noise)
    return replace(row, interval_percent=ratio_interval(value_a, value_b, noise))


def _row(
    label: str,
    unit: str,
    a: float | None,
    b: float | None,
    noise: float | None = 0.0,
    *,
    least: float = 0.0,
    more_is_better: bool | None = False,
) -> ComparisonRow:
    """The row of a figure, whose difference counts above `noise` (a share, None: never) and above `least` of the unit.

    `more_is_better` is None for a figure that is neither better high nor low.
    """
    if a is None or b is None:
        return ComparisonRow(label, unit, a, b, None, None, UNKNOWN)
    delta = b - a
    percent = 100 * delta / abs(a) if a else None
    if not is_significant(a, b, noise) or abs(delta) <= least:
        verdict = NOISE
    elif more_is_better is None:
        verdict = CHANGED
    else:
        verdict = BETTER if (delta > 0) == more_is_better else WORSE
    return ComparisonRow(label, unit, a, b, delta, percent, verdict)


def _with_verdict(row: ComparisonRow, verdict: str | None) -> ComparisonRow:
    """The row with another verdict; unchanged without one, and if the figure is not known of both runs."""
    return row if verdict is None or row.delta is None else replace(row, verdict=verdict)


def _notes(a: Result, b: Result) -> Iterator[str]:
    if a.preset != b.preset or a.variant != b.variant:
        yield f"different presets: {a.name} and {b.name}"
    for result in (a, b):
        if result.role == PROBE:
            tried = ", ".join(map(str, result.tried)) or "none recorded"
            yield f"{result.run_id} is a search's probe, which tried one batch_size after another: {tried}"
        elif result.role in WARM_ROLES:
            yield f"{result.run_id} tried {len(result.tried)} settings for a search, one after another"
        if result.state != "finished":
            yield f"{result.run_id} ended {state_text(result.state)}: {result.reason}"
        if result.synthetic_data:
            yield f"{result.run_id} trained on synthetic data: its loss is meaningless"
        if result.energy.joules_per_sample is not None and (watched := watched_text(result)):
            yield f"the energy of {result.run_id} is that of {watched}, which it does not use"
        for qualification in qualifications(result):
            yield f"{'A' if result is a else 'B'} {qualification}"
    if a.actual.device != b.actual.device and a.actual.device and b.actual.device:
        yield f"different devices: {a.actual.device} and {b.actual.device}"
