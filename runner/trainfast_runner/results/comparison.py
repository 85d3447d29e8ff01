"""Two runs side by side: differing settings, figures, losses, and the significance of each difference.

Each phase of a step is compared by its own spread, and must also differ by half a percent of the step. Figures
without a spread (peak memory, energy) must differ by `RUN_TO_RUN`.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from trainfast_runner.errors import UserError
from trainfast_runner.machine.telemetry.throttle import CAUSES
from trainfast_runner.records.home import Home
from trainfast_runner.records.json_lines import Tail
from trainfast_runner.records.result import LOSSES_IN_A_MEAN, MIN_STEPS_TO_COMPARE, Doubt, LossDifference, Result
from trainfast_runner.records.run_directory import RunRecords, rank_file, read_result, read_run_file, state_text
from trainfast_runner.records.run_file import RecordedKnobs
from trainfast_runner.records.run_lines import Step
from trainfast_runner.records.worker_lines import WARM_ROLES, ActualLine, newest_of_first_rank
from trainfast_runner.results.distributions import MAD_TO_SIGMA, MEDIAN_VARIANCE, drift_text, student_95
from trainfast_runner.results.doubts import doubts, qualifications, watched_text
from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_runner.units import CPU, cpu_processes
from trainfast_runner.worker.catalog import LEVERS
from trainfast_runner.worker.shared.words import PROBE, STEP_PHASES

TEMPERATURE_APART_C = 10.0
"""Chosen, not measured: degrees C between two GPUs' starts from which they may differ in clock."""
PERCENT_APART = 2.0
"""Chosen, not measured: difference of two throttled shares that counts. All of it lost, it lengthens a step by as much
as two equal runs differ."""
CPU_LEFT_APART = 0.05
"""Chosen, not measured: relative difference of the CPU that others leave to two runs on the CPU."""


@dataclass(frozen=True)
class ConditionRow:
    """A condition of both runs in words, None when it is not known; `differs` when it may explain a difference."""

    label: str
    a: str | None
    b: str | None
    differs: bool


def compared_conditions(a: Result, b: Result) -> list[ConditionRow]:
    """Return the rows with a value for at least one run."""
    rows: list[ConditionRow] = []

    def pair(name: str) -> tuple[Any, Any]:
        return attrgetter(name)(a), attrgetter(name)(b)

    def add(label: str, figures: tuple[Any, ...], differs: bool | None = None, text: str = "{}") -> None:
        """Add a row; the two differ if they are not equal, or by `differs`."""
        if figures != (None, None):
            differs = figures[0] != figures[1] if differs is None else differs
            text_a, text_b = (None if figure is None else text.format(figure) for figure in figures)
            rows.append(ConditionRow(label, text_a, text_b, differs and None not in figures))

    # Heat slows a run by its clocks alone.
    clock_losses = pair("throttle.clock_loss_fraction")
    same_clocks = None not in clock_losses and not _are_apart(clock_losses, PERCENT_APART / 100)
    for label, name in (
        ("start temperature", "start_temperature_c"),
        ("temperature as measuring began", "measured_from_temperature_c"),
    ):
        temperatures_c = pair(f"conditions.{name}")
        add(label, temperatures_c, not same_clocks and _are_apart(temperatures_c, TEMPERATURE_APART_C), "{:.0f} °C")
    for cause in CAUSES:
        fractions = pair(f"throttle.{cause.name}_fraction")
        # Other settings draw other power: that difference is theirs.
        by_settings = cause.name == "power" and (a.knobs, a.overrides) != (b.knobs, b.overrides)
        if any(fractions):
            differs = not by_settings and _are_apart(fractions, PERCENT_APART / 100)
            percents = tuple(None if fraction is None else 100 * fraction for fraction in fractions)
            add(f"throttled by {cause.text}", percents, differs, "{:.1f} % of the time")
    if any(others := (len(a.conditions.foreign_processes), len(b.conditions.foreign_processes))):
        add("other processes", others)
    # 89 % and 85 % taken leave 11 and 15, a third more. A run on a GPU leaves most of the cores to others anyway.
    taken_percent = pair("conditions.others_cpu_percent")
    left_percent = [max(1.0, 100 - percent) for percent in taken_percent if percent is not None] or [1.0]
    leave_apart = max(left_percent) / min(left_percent) > 1 + CPU_LEFT_APART
    add("CPU taken by others", taken_percent, CPU in pair("actual.device") and leave_apart, "{:.0f} %")
    policies = a.cpu and a.cpu.wait_policy, b.cpu and b.cpu.wait_policy
    if None not in policies and policies[0] != policies[1]:
        add("OpenMP wait policy", policies)
    add("driver", pair("conditions.driver"))
    warming = pair("conditions.still_warming")
    add("steady", (_steady(a), _steady(b)), warming[0] != warming[1])
    return rows


def _are_apart(figures: tuple[Any, Any], least_difference: float) -> bool:
    """True if two figures are known and further apart than `least_difference`."""
    return None not in figures and bool(abs(figures[0] - figures[1]) > least_difference)


def _steady(result: Result) -> str | None:
    conditions = result.conditions
    if not conditions.still_warming:
        return None if conditions.still_warming is None else "yes"
    return drift_text(conditions.temperature_slope_c_per_min)


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


PHASE = "step: "
"""The beginning of a phase's label."""
FOLDED_SHARE = 0.01


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
    figures that do not rank, one of those of `unlike_work_verdict`."""
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

    @property
    def shown_rows(self) -> list[ComparisonRow]:
        """The rows with a figure, each once, without phases that take less than `FOLDED_SHARE` of both steps."""
        step = next(row for row in self.rows if row.label == "step")
        least = [FOLDED_SHARE * (value or 0.0) for value in (step.a, step.b)]
        shown: dict[tuple[str, float | None, float | None], ComparisonRow] = {}
        for row in self.rows:
            is_folded = row.label.startswith(PHASE) and (row.a or 0.0) < least[0] and (row.b or 0.0) < least[1]
            if (row.a is not None or row.b is not None) and not is_folded:
                # On a CPU all reserved memory is allocated.
                shown.setdefault((row.unit, row.a, row.b), row)
        return [*shown.values()]


def compare(a: Result, b: Result) -> Comparison:
    """The difference of `b` from `a`."""
    conditions = compared_conditions(a, b)
    found = list(_doubts(a, b, conditions))
    rows = list(_rows(a, b, DOUBTFUL if found else None))
    return Comparison(a.run_id, b.run_id, _differing_settings(a, b), rows, list(_notes(a, b)), conditions, found)


def pooled(pairs: Sequence[Comparison]) -> Comparison:
    """Return the comparison of two settings that ran in turn (A B A B), of one comparison for each pair of runs.

    Figures are means over the pairs. What ranks is judged by its spread among the runs of one setting, which holds what
    the conditions did, so that no doubt is left. One pair is returned as it is.
    """
    *earlier, last = pairs
    if not earlier:
        return last
    by_label = [{row.label: row for row in pair.rows} for pair in pairs]
    rows = [_pooled_row([rows.get(row.label, row) for rows in by_label]) for row in last.rows]
    return replace(last, rows=rows, doubts=[])


def _pooled_row(rows: Sequence[ComparisonRow]) -> ComparisonRow:
    last = rows[-1]
    sides = [
        [figure for figure in side if figure is not None] for side in ([row.a for row in rows], [row.b for row in rows])
    ]
    if min(map(len, sides)) < len(rows):
        return last
    a, b = map(statistics.fmean, sides)
    row = replace(last, a=a, b=b, delta=b - a, percent=100 * (b - a) / abs(a) if a else None)
    is_judged = last.interval_percent is not None or any(pair.verdict == DOUBTFUL for pair in rows)
    interval = repeated_interval(*sides) if is_judged else None
    if interval is None:
        return row
    verdict = row.verdict
    if verdict in (BETTER, WORSE, DOUBTFUL, NOISE):
        more_is_better = row.unit.endswith("/s")
        verdict = NOISE if interval[0] <= 0 <= interval[1] else BETTER if (b > a) == more_is_better else WORSE
    return replace(row, verdict=verdict, interval_percent=interval)


def _doubts(a: Result, b: Result, conditions: Sequence[ConditionRow]) -> Iterator[Doubt]:
    for letter, result in (("A", a), ("B", b)):
        for doubt in doubts(result):
            yield Doubt(kind=doubt.kind, text=f"{letter} {doubt.text}")
    if differing := [row.label for row in conditions if row.differs]:
        text = f"the conditions differed ({', '.join(differing)}): part of the difference may come from them"
        yield Doubt(kind="other_conditions", text=text)


def _differing_settings(a: Result, b: Result) -> list[tuple[str, Any, Any]]:
    knobs_a, knobs_b = (
        # Of a search's probe the last batch size that it tried.
        {**run_knobs(result), **section_overrides(result), **({"batch_size": result.tried[-1]} if result.tried else {})}
        for result in (a, b)
    )
    names = dict.fromkeys([*KNOBS_BY_NAME, *a.knobs, *b.knobs, *knobs_a, *knobs_b])
    if "auto" in (knobs_a.get("attention"), knobs_b.get("attention")) and a.actual.attention == b.actual.attention:
        # sdpa was the default once, so the same kernel may be named or left open.
        names.pop("attention", None)
    return [(name, knobs_a.get(name), knobs_b.get(name)) for name in names if knobs_a.get(name) != knobs_b.get(name)]


def _rows(a: Result, b: Result, doubtful: str | None) -> Iterator[ComparisonRow]:
    """Every row, in the order in which they are shown; `doubtful` is the verdict on figures that are in doubt."""
    noise, unlike_work = relative_noise(a, b), unlike_work_verdict(a, b)
    unlike_samples = unlike_work if unlike_work in DIFFERENT_SAMPLE_VERDICTS else None
    unranked = unlike_samples if speeds_rank(a, b) else STRICT_THRESHOLDS
    """The verdict on samples/s that do not rank."""
    # Tokens of another length are the same work.
    unranked_tokens = None if unranked == DIFFERENT_SEQ_LEN else unranked
    # A mean holds the pauses that a median does not: both sides have the same.
    statistic = "mean" if None in [result.throughput.samples_per_s.median for result in (a, b)] else "median"
    speeds = {
        "throughput": ("samples/s", f"throughput.samples_per_s.{statistic}", unranked),
        "token throughput": ("tokens/s", f"throughput.tokens_per_s.{statistic}", unranked_tokens),
        "step": ("ms", "step_ms.p50", unranked or unlike_work),
    }
    for label, (unit, name, verdict) in speeds.items():
        figures = attrgetter(name)(a), attrgetter(name)(b)
        row = _row(label, unit, figures, noise, more_is_better=unit != "ms", verdict=verdict or doubtful)
        # Steps of another batch do not rank, but their difference has an interval.
        interval = None if verdict is not None and unranked else ratio_interval(*figures, noise)
        yield replace(row, interval_percent=interval)
        if label == "throughput" and (a.throughput.predicted or b.throughput.predicted):
            predicted = [getattr(result.throughput.predicted, "median", None) for result in (a, b)]
            yield _row("throughput predicted", "samples/s", predicted, more_is_better=None)
    for name in STEP_PHASES:
        phase = [getattr(result.step_ms, name) for result in (a, b)]
        verdict = unranked or unlike_work or doubtful
        yield _row(f"{PHASE}{name}", "ms", phase, least=_least_phase_ms(name, a, b), verdict=verdict)
    # Another batch or model takes other memory: neither is the better one for it.
    less_is_better = None if unlike_samples or unlike_work == DIFFERENT_BATCH else False
    for label, name, more_is_better, least_bytes in (
        ("peak allocated", "peak_allocated_bytes", less_is_better, MIN_DIFFERENCE_BYTES),
        ("peak predicted", "predicted_bytes", None, 0),
        ("peak reserved", "peak_reserved_bytes", less_is_better, MIN_DIFFERENCE_BYTES),
        ("device peak", "device_peak_used_bytes", less_is_better, MIN_DIFFERENCE_BYTES),
    ):
        sizes = [getattr(result.memory, name) for result in (a, b)]
        yield _row(label, "bytes", sizes, least=least_bytes, more_is_better=more_is_better)
    joules = a.energy.joules_per_sample, b.energy.joules_per_sample
    # The energy of devices that the other run did not watch is none of its own.
    watched = [{device.uuid for device in result.throttle.devices} for result in (a, b)]
    differ = a.knobs.get("watch") != b.knobs.get("watch") and watched[0] != watched[1]
    verdict = unlike_samples or (DIFFERENT_DEVICES if differ else doubtful)
    yield _row("energy a sample", "J", joules, verdict=verdict)
    steps_a, steps_b = (result.steps.warmup + result.steps.measured for result in (a, b))
    verdict = None if steps_a == steps_b else DIFFERENT_STEPS
    yield _row("last loss", "", (a.loss.last, b.loss.last), more_is_better=None, verdict=verdict)


def _least_phase_ms(name: str, a: Result, b: Result) -> float:
    """The least difference of a phase that counts, by its own spread; infinite without one, or with too few steps."""
    mads, steps_ms = [result.step_ms.mad.get(name) for result in (a, b)], [result.step_ms.p50 for result in (a, b)]
    counts = [result.steps.measured for result in (a, b)]
    if None in (*mads, *steps_ms) or min(counts) < MIN_STEPS_TO_COMPARE:
        return math.inf
    errors = [median_error(mad or 0.0, count) for mad, count in zip(mads, counts, strict=True)]
    return max(MIN_STEP_SHARE * max(filter(None, steps_ms), default=0.0), ERRORS_APART * math.hypot(*errors))


def _row(
    label: str,
    unit: str,
    figures: Sequence[float | None],
    noise: float | None = 0.0,
    *,
    least: float = 0.0,
    more_is_better: bool | None = False,
    verdict: str | None = None,
) -> ComparisonRow:
    """The row of a figure, whose difference counts above `noise` (a share, None: never) and above `least` of the unit.

    `more_is_better` is None for a figure that is neither better high nor low; `verdict` replaces that of the figures.
    """
    a, b = figures
    if a is None or b is None:
        return ComparisonRow(label, unit, a, b, None, None, UNKNOWN)
    delta = b - a
    if verdict is None and (not is_significant(a, b, noise) or abs(delta) <= least):
        verdict = NOISE
    elif verdict is None:
        verdict = CHANGED if more_is_better is None else BETTER if (delta > 0) == more_is_better else WORSE
    return ComparisonRow(label, unit, a, b, delta, 100 * delta / abs(a) if a else None, verdict)


def _notes(a: Result, b: Result) -> Iterator[str]:
    if a.preset != b.preset or a.variant != b.variant:
        yield f"different presets: {a.name} and {b.name}"
    for letter, result in (("A", a), ("B", b)):
        if result.role == PROBE:
            tried = ", ".join(map(str, result.tried)) or "none recorded"
            yield f"{letter} is a search's probe, which tried one batch_size after another: {tried}"
        elif result.role in WARM_ROLES:
            yield f"{letter} tried {len(result.tried)} settings for a search, one after another"
        if result.state != "finished":
            yield f"{letter} ended {state_text(result.state)}: {result.reason}"
        if result.synthetic_data:
            yield f"{letter} trained on synthetic data: its loss is meaningless"
        if result.energy.joules_per_sample is not None and (watched := watched_text(result)):
            yield f"the energy of {letter} is that of {watched}, which it does not use"
        yield from (f"{letter} {qualification}" for qualification in qualifications(result))
    if a.actual.device != b.actual.device and a.actual.device and b.actual.device:
        yield f"different devices: {a.actual.device} and {b.actual.device}"
    if all(name in NOT_OF_A_STEP for name, _, _ in _differing_settings(a, b)) and unlike_work_verdict(a, b) is None:
        yield from _pay_back("A", a, b)
        yield from _pay_back("B", b, a)


NOT_OF_A_STEP = ("compile", "steps", "timing_warmup", "watch")
"""Knobs that change the compilation or the measurement, not the work of a step."""


def _pay_back(letter: str, compiled: Result, other: Result) -> Iterator[str]:
    """Yield the steps after which compiling has paid for itself beside a run of the same work with compile=off."""
    compiled_ms, other_ms, cost = compiled.step_ms.p50, other.step_ms.p50, compiled.compile
    if cost is None or cost.cold_seconds is None or other.compile is not None or not compiled_ms or not other_ms:
        return
    saved_ms = other_ms - compiled_ms
    noise_ms = (compiled.step_ms.mad.get("step") or 0.0) + (other.step_ms.mad.get("step") or 0.0)
    if abs(saved_ms) <= noise_ms or compiled.measured_under or other.measured_under:
        return
    steps = f"after {1000 * cost.cold_seconds / saved_ms:,.0f} steps" if saved_ms > 0 else "never"
    yield f"compiling took {letter} {cost.cold_seconds:.1f} s, which its faster steps win back {steps}"


# Verdicts on a step whose work differs: it is neither better nor worse for taking longer.
DIFFERENT_BATCH = "not comparable: different batch"
DIFFERENT_DEVICES = "not comparable: different devices"
DIFFERENT_MODEL = "not comparable: different model"
DIFFERENT_SCRIPT = "not comparable: different scripts"
SCRIPT_AND_PRESET = "not comparable: a script and a preset"
DIFFERENT_SEQ_LEN = "not comparable: different seq_len"
"""The verdict on figures of samples and steps of different lengths; tokens/s still rank."""
DIFFERENT_SAMPLE_VERDICTS = (DIFFERENT_MODEL, DIFFERENT_SCRIPT, SCRIPT_AND_PRESET, DIFFERENT_SEQ_LEN)
"""Verdicts on runs whose samples are other work: throughput and energy a sample rank no more than a step."""
DIFFERENT_STEPS = "not comparable: different number of steps"
"""The verdict on the last losses of trainings of different length."""
STRICT_THRESHOLDS = "not comparable: strict malloc thresholds"
"""The verdict on every speed if one of the runs was measured under strict thresholds."""
BATCH_KNOBS = ("batch_size", "grad_accum", "seq_len")
DEVICE_KNOBS = ("strategy", "devices", "tp_degree", "pp_degree", "micro_batches")


def unlike_work_verdict(a: Result, b: Result) -> str | None:
    """Return the verdict on steps that do different work in the two runs; None if they do the same."""
    if (a.script is None) != (b.script is None):
        return SCRIPT_AND_PRESET
    if a.script is not None and b.script is not None and not a.script.is_of_one_script(b.script):
        return DIFFERENT_SCRIPT
    shapes = [(result.actual.layers, result.actual.hidden_size, result.actual.vocab_size) for result in (a, b)]
    shapes_differ = any(None not in pair and pair[0] != pair[1] for pair in zip(*shapes, strict=True))
    if shapes_differ or section_overrides(a, "model.") != section_overrides(b, "model."):
        return DIFFERENT_MODEL
    lengths = a.knobs.get("seq_len"), b.knobs.get("seq_len")
    if None not in lengths and lengths[0] != lengths[1]:
        return DIFFERENT_SEQ_LEN
    if any(a.knobs.get(name) != b.knobs.get(name) for name in BATCH_KNOBS):
        return DIFFERENT_BATCH
    worlds = a.actual.world_size, b.actual.world_size
    shared_out = None not in worlds and worlds[0] != worlds[1]
    knobs_a, knobs_b = run_knobs(a), run_knobs(b)
    differ = shared_out or any(knobs_a.get(name) != knobs_b.get(name) for name in DEVICE_KNOBS)
    return DIFFERENT_DEVICES if differ else None


def run_knobs(result: Result) -> dict[str, Any]:
    """The knobs of a run; `devices=cpu:2` of a run on the CPU is its count, as on a machine without a GPU."""
    processes = cpu_processes(result.knobs.get("devices"))
    if processes is None or result.actual.device != CPU:
        return result.knobs
    return {**result.knobs, "devices": processes}


def speeds_rank(a: Result, b: Result) -> bool:
    """True if neither run was measured under strict malloc thresholds."""
    return a.measured_under is None and b.measured_under is None


def section_overrides(result: Result, section: str = "") -> dict[str, Any]:
    """Only the model and data overrides, by `model.FIELD` and `data.FIELD`."""
    return {name: value for name, value in result.overrides.items() if "." in name and name.startswith(section)}


MIN_PAIRS = 3
"""Fewest pairs with an interval: two would give one eight times as wide as their difference."""


def paired_interval(pairs: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """95 % confidence interval of the difference in percent of the baseline.

    Each pair holds the rates of (baseline, variant). None with fewer than `MIN_PAIRS` pairs of positive rates.
    """
    logs = [math.log(variant / base) for base, variant in pairs if base > 0 and variant > 0]
    if len(logs) < MIN_PAIRS:
        return None
    mean_log, freedom = statistics.fmean(logs), len(logs) - 1
    half_width = student_95(freedom) * statistics.stdev(logs) / math.sqrt(len(logs))
    return 100 * math.expm1(mean_log - half_width), 100 * math.expm1(mean_log + half_width)


def repeated_interval(a: Sequence[float], b: Sequence[float]) -> tuple[float, float] | None:
    """95 % confidence interval of the difference in percent of A, by the spread among the runs of each setting.

    None without two positive figures of each.
    """
    if min(len(a), len(b)) < 2 or min(*a, *b) <= 0:
        return None
    logs, freedom = [[math.log(figure) for figure in side] for side in (a, b)], len(a) + len(b) - 2
    mean_log = statistics.fmean(logs[1]) - statistics.fmean(logs[0])
    variance = sum((len(side) - 1) * statistics.variance(side) for side in logs) / freedom
    half_width = student_95(freedom) * math.sqrt(variance * (1 / len(a) + 1 / len(b)))
    return 100 * math.expm1(mean_log - half_width), 100 * math.expm1(mean_log + half_width)


ERRORS_APART = 3.0
"""Chosen, not measured: standard errors by which two figures must differ."""
RUN_TO_RUN = 0.02
"""Chosen, not measured: share by which two runs of the same settings differ."""


def is_significant(a: float | None, b: float | None, noise: float | None) -> bool:
    """True if the ratio of two figures is over `noise` (a share) and the floor; never if `noise` is None.

    If a figure is zero or negative, any difference counts.
    """
    if a is None or b is None or noise is None:
        return False
    if a <= 0 or b <= 0:
        return a != b
    return abs(math.log(b / a)) > max(noise, math.log1p(RUN_TO_RUN))


def ratio_interval(a: float | None, b: float | None, noise: float | None) -> tuple[float, float] | None:
    """The ratio's interval as percentages of `a`; None without a ratio or a noise to build it from."""
    if a is None or b is None or noise is None or a <= 0 or b <= 0:
        return None
    half_width = max(noise, math.log1p(RUN_TO_RUN))
    return 100 * (b / a * math.exp(-half_width) - 1), 100 * (b / a * math.exp(half_width) - 1)


def median_error(mad: float, count: int) -> float:
    """The standard error of the median of `count` values whose median absolute deviation is `mad`."""
    return MAD_TO_SIGMA * mad * math.sqrt(MEDIAN_VARIANCE / count)


def relative_noise(a: Result, b: Result) -> float | None:
    """The smallest significant difference of step times and rates as a share of the figure; None: too few steps."""
    errors = []
    for result in (a, b):
        throughput, steps = result.throughput, result.steps.measured
        # Steps that differ in size have no median rate: the spread of their times, which is larger, stands for it.
        spread = throughput.steps_per_s if throughput.samples_per_s.median is None else throughput.samples_per_s
        if steps < MIN_STEPS_TO_COMPARE or not spread.median or spread.mad is None:
            return None
        errors.append(median_error(spread.mad / spread.median, steps))
    return ERRORS_APART * math.hypot(*errors)


Pairs = Iterable[tuple[float | None, float | None]]
"""Losses of the same steps of two runs."""
HALF_PRECISION_TOLERANCE = 1e-2
"""Greatest relative difference of a step's loss by a lever in half precision, and with TF32."""
WITHOUT_EFFECT = (
    *("steps", "timing_warmup", "watch", "memory_limit", "workers", "pin_memory", "prefetch"),
    *("devices", "p2p", "offload_path"),
)
"""Knobs that change no loss: the learning rate, which a schedule takes from `steps`, is compared step by step."""
SAME = ("script", "model", "data", "device", "world_size", "device_names", "versions")
"""Fields of `run.json` that are equal in runs which compare."""
RUNS_LOOKED_AT = 20
"""Newest runs of the home among which a plain one is sought."""
HEAD_BYTES = 16 << 10
"""Part of `steps.jsonl` that holds the first steps."""


def loss_difference(
    knobs: RecordedKnobs, plain: RecordedKnobs, pairs: Pairs, *, redraws: bool, against: str = ""
) -> LossDifference | None:
    """The greatest relative difference of the first losses, in pairs with the plain ones, and what levers may cause.

    None without losses, and unless the two differ in levers alone of what losses depend on; neither in one that draws
    the masks of dropout anew while `redraws` is true.
    """
    tolerances: list[float | None] = []
    for name in {*knobs, *plain}.difference(WITHOUT_EFFECT):
        if knobs.get(name) == plain.get(name):
            continue
        lever = LEVERS.get(name)
        if lever is None or (redraws and lever.redraws_dropout):
            return None
        tolerances += [lever[knobs.get(name)].tolerance, lever[plain.get(name)].tolerance]
    shares = [abs(a - b) / abs(b) for a, b in itertools.islice(pairs, LOSSES_IN_A_MEAN) if a is not None and b]
    if not shares or not any(tolerances) or None in tolerances:
        return None
    least = 0.0 if knobs.get("precision", "fp32") == "fp32" else HALF_PRECISION_TOLERANCE
    tolerance = max(least, *filter(None, tolerances))
    return LossDifference(greatest=max(shares), tolerance=tolerance, steps=len(shares), against=against)


def loss_difference_of(directory: Path, records: RunRecords) -> LossDifference | None:
    """The difference from the newest finished run of the home that has the same settings with plainer levers."""
    run, ran = records.run, newest_of_first_rank(records.worker_lines, ActualLine)
    if run is None or run.script is not None or not _turned(run.knobs):
        return None
    with suppress(OSError, UserError):  # without a readable history there is nothing to compare with
        home = Home.of_run(directory)
        for other in map(home.directory, home.newest_run_ids(RUNS_LOOKED_AT)):
            plain = read_run_file(other)
            if plain is None or any(getattr(run, name) != getattr(plain, name) for name in SAME):
                continue
            pairs = list(zip(_first_steps(directory), _first_steps(other), strict=False))
            is_same = all((a.step, a.samples, a.tokens, a.lr) == (b.step, b.samples, b.tokens, b.lr) for a, b in pairs)
            if not is_same or not _turned(plain.knobs) < _turned(run.knobs):
                continue
            losses, redraws = [(a.loss, b.loss) for a, b in pairs], ran is None or ran.dropout is not False
            found = loss_difference(run.knobs, plain.knobs, losses, redraws=redraws, against=other.name)
            if found is not None and (result := read_result(other)) is not None and result.state == "finished":
                return found
    return None


def _turned(knobs: RecordedKnobs) -> set[tuple[str, Any]]:
    """The levers with a value that may change a loss."""
    return {(name, knobs.get(name)) for name, lever in LEVERS.items() if lever[knobs.get(name)].tolerance}


def _first_steps(directory: Path) -> list[Step]:
    """The first steps of rank 0."""
    return Tail(rank_file(directory, "steps", 0), Step, HEAD_BYTES).new()[:LOSSES_IN_A_MEAN]
