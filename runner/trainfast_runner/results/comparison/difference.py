"""Two runs side by side: differing settings, figures, and the significance of each difference.

The rule of significance, per figure: a median of n values has the variance 1 / (4 n f(m)^2), f the density at the
median m, which for normal values makes its standard error sqrt(pi / 2) sigma / sqrt(n); sigma is estimated as
1.4826 MAD (Rousseeuw & Croux, Alternatives to the Median Absolute Deviation, JASA 88, 1993). A difference counts when
it is over three times the standard error of the difference of the two medians, taken between logarithms so that a
rate and its time per step get the same answer, and over 2 %: a floor for what varies from process to process, which
the steps of one run cannot show. With fewer than five measured steps on a side nothing is significant.

A step's phases each have a spread of their own, and a floor more: what is less than half a percent of the step is no
difference of the step. A result of an older version holds the spread of throughput only; its phases are held against
the spread of the whole step. Figures without spread (peak memory, energy) are held against the 2 % alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from trainfast_runner.machine.cpu.device_names import CPU, cpu_processes
from trainfast_runner.records.result import FEW_STEPS, Result
from trainfast_runner.records.run_file import PROBE, STEP_PHASES, WARM_ROLES, Actual
from trainfast_runner.records.state_words import state_words
from trainfast_runner.results.bottleneck.doubts import doubts, watched_words
from trainfast_runner.results.comparison.conditions import ConditionRow, compared_conditions
from trainfast_runner.results.distributions import MAD_TO_SIGMA, MEDIAN_VARIANCE
from trainfast_runner.settings.knobs import BY_NAME

BETTER, WORSE = "better", "worse"
NOISE = "no significant difference"
CHANGED = "changed"
UNKNOWN = "not measured in both"
OTHER_BATCH = "not comparable: different batch"
OTHER_DEVICES = "not comparable: different devices"
OTHER_MODEL = "not comparable: different model"
"""Verdicts on a step whose work differs: it is neither better nor worse for taking longer."""
OTHER_SCRIPT = "not comparable: different scripts"
SCRIPT_AND_PRESET = "not comparable: a script and a preset"
OTHER_SEQ_LEN = "not comparable: different seq_len"
"""The verdict on figures of samples and steps of different lengths; tokens/s still rank."""
OTHER_SAMPLES = (OTHER_MODEL, OTHER_SCRIPT, SCRIPT_AND_PRESET, OTHER_SEQ_LEN)
"""Verdicts on runs whose samples are other work: throughput and energy a sample rank no more than a step."""
STRICT_THRESHOLDS = "not comparable: strict malloc thresholds"
"""The verdict on every speed if one of the runs was measured under strict thresholds."""
BATCH_KNOBS = ("batch_size", "grad_accum", "seq_len")
DEVICE_KNOBS = ("strategy", "devices", "tp_degree", "pp_degree", "micro_batches")
ERRORS_APART = 3.0
RUN_TO_RUN = 0.02
LEAST_OF_A_STEP = 0.005
"""Ours: a difference of a phase below this share of the step does not count."""
LEAST_BYTES = 2 << 20
"""Ours: allocators hand out memory by blocks of 2 MiB (PyTorch's CUDA caching allocator) and round."""
MEDIAN_ERROR = math.sqrt(MEDIAN_VARIANCE)


@dataclass(frozen=True)
class ComparisonRow:
    """One figure of both runs. `unit` is samples/s, tokens/s, ms, bytes, J or empty; `delta` is b - a in that unit.

    `verdict` is better, worse, changed (neither is better), "no significant difference", "not measured in both",
    `OTHER_BATCH` or `OTHER_DEVICES` for a step and its phases if the work of a step differs, one of `OTHER_SAMPLES` for
    every speed if that of a sample does (tokens/s rank across `seq_len`), or `STRICT_THRESHOLDS` for every speed if a
    run was measured under those.
    """

    label: str
    unit: str
    a: float | None
    b: float | None
    delta: float | None
    percent: float | None
    verdict: str
    interval_percent: tuple[float, float] | None = None
    """95 % confidence interval of the difference, in percent of a."""


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side.

    `knobs` are the differing knobs as (name, a, b), then the differing overrides of model and data (None: the preset's
    value); `conditions` are the known ones of either run; `notes` make the figures less comparable.
    """

    a: str
    b: str
    knobs: list[tuple[str, Any, Any]]
    rows: list[ComparisonRow]
    notes: list[str]
    conditions: list[ConditionRow]


def compare(a: Result, b: Result) -> Comparison:
    """The difference of `b` from `a`."""
    conditions = compared_conditions(a, b)
    notes = list(_notes(a, b))
    if differing := [row.label for row in conditions if row.differs]:
        notes.insert(
            0,
            f"the conditions differed ({', '.join(differing)}): part of the difference may be theirs; `bench"
            " --repeat 3` runs two variants in turn (A B A B), so that both have the same",
        )
    return Comparison(a.run_id, b.run_id, _settings(a, b), list(_rows(a, b)), notes, conditions)


def _settings(a: Result, b: Result) -> list[tuple[str, Any, Any]]:
    one, other = ({**_knobs(result), **_fields(result), **_tried(result)} for result in (a, b))
    names = dict.fromkeys([*BY_NAME, *a.knobs, *b.knobs, *one, *other])
    if "auto" in (one.get("attention"), other.get("attention")) and a.actual.attention == b.actual.attention:
        # sdpa was the default once, so the same kernel may be named or left open.
        names.pop("attention", None)
    return [(name, one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)]


def _tried(result: Result) -> dict[str, Any]:
    """The batch size of a run; of a search's probe the last one it tried."""
    return {"batch_size": result.tried[-1]} if result.tried else {}


def _fields(result: Result, section: str = "") -> dict[str, Any]:
    """Only the model and data overrides, by `model.FIELD` and `data.FIELD`."""
    return {name: value for name, value in result.overrides.items() if "." in name and name.startswith(section)}


def _rows(a: Result, b: Result) -> Iterator[ComparisonRow]:
    noise, other_work = _relative_noise(a, b), _other_work(a, b)
    other_samples = other_work if other_work in OTHER_SAMPLES else None
    unranked = other_samples if speeds_rank(a, b) else STRICT_THRESHOLDS
    no_ranking = unranked or other_work
    unranked_tokens = None if unranked == OTHER_SEQ_LEN else unranked
    rates_a, rates_b, step_a, step_b = a.throughput, b.throughput, a.step_ms.p50, b.step_ms.p50
    for label, unit, one, other, verdict in (
        ("throughput", "samples/s", rates_a.samples_per_s.median, rates_b.samples_per_s.median, unranked),
        ("token throughput", "tokens/s", rates_a.tokens_per_s.median, rates_b.tokens_per_s.median, unranked_tokens),
        ("step", "ms", step_a, step_b, no_ranking),
    ):
        row = _row(label, unit, one, other, _ratio_counts(one, other, noise), more_is_better=unit != "ms")
        # Steps of another batch have no ranking, and an interval all the same.
        interval = None if verdict is not None and unranked else _interval(one, other, noise)
        yield _with_verdict(replace(row, interval_percent=interval), verdict)
        if unit == "samples/s" and (rates_a.predicted or rates_b.predicted):
            one, other = (rates.predicted.median if rates.predicted else None for rates in (rates_a, rates_b))
            yield _row("throughput predicted", unit, one, other, _ratio_counts(one, other, 0.0), None)
    step_noise = None if noise is None or step_a is None or step_b is None else noise * max(step_a, step_b)
    for name in STEP_PHASES:
        one, other = getattr(a.step_ms, name), getattr(b.step_ms, name)
        by_itself = _phase(name, a, b)
        if by_itself is not None:
            yield _with_verdict(by_itself, no_ranking)
        else:
            counts = _ratio_counts(one, other, 0.0) and step_noise is not None and abs(other - one) > step_noise
            yield _with_verdict(_row(f"step: {name}", "ms", one, other, counts), no_ranking)
    for label, unit, one, other in (
        ("peak allocated", "bytes", a.memory.peak_allocated_bytes, b.memory.peak_allocated_bytes),
        ("peak reserved", "bytes", a.memory.peak_reserved_bytes, b.memory.peak_reserved_bytes),
        ("device peak", "bytes", a.memory.device_peak_used_bytes, b.memory.device_peak_used_bytes),
        ("energy a sample", "J", a.energy.joules_per_sample, b.energy.joules_per_sample),
    ):
        counts = _ratio_counts(one, other, 0.0) and (unit != "bytes" or _is_more_than_pages(one, other))
        # Another batch or model takes other memory: neither is the better one for it.
        is_better = None if unit == "bytes" and (other_samples or other_work == OTHER_BATCH) else False
        row = _row(label, unit, one, other, counts, is_better)
        if unit == "J":
            row = _with_verdict(row, other_samples or (OTHER_DEVICES if _watched_differently(a, b) else None))
        yield row
        if label == "peak allocated":
            one, other = a.memory.predicted_bytes, b.memory.predicted_bytes
            yield _row("peak predicted", "bytes", one, other, _ratio_counts(one, other, 0.0), None)
    yield _row("last loss", "", a.loss.last, b.loss.last, _ratio_counts(a.loss.last, b.loss.last, 0.0), None)


def _phase(name: str, a: Result, b: Result) -> ComparisonRow | None:
    """The row of a phase by its own spread; None when a result does not hold that, or has too few steps."""
    one, other = (getattr(result.step_ms, name) for result in (a, b))
    errors, steps = [], []
    for result in (a, b):
        mad, step = result.step_ms.mad.get(name), result.step_ms.p50
        if mad is None or step is None or result.steps.measured < FEW_STEPS:
            return None
        errors.append(MEDIAN_ERROR * MAD_TO_SIGMA * mad / math.sqrt(result.steps.measured))
        steps.append(step)
    floor = LEAST_OF_A_STEP * max(steps)
    if one <= 0 or other <= 0:
        # Without a ratio to take a logarithm of, the milliseconds themselves are compared.
        return _row(
            f"step: {name}", "ms", one, other, abs(other - one) > max(floor, ERRORS_APART * math.hypot(*errors))
        )
    noise = ERRORS_APART * math.hypot(errors[0] / one, errors[1] / other)
    noise = max(noise, math.log1p(floor / max(one, other)))
    row = _row(f"step: {name}", "ms", one, other, _ratio_counts(one, other, noise))
    return replace(row, interval_percent=_interval(one, other, noise))


def _row(
    label: str, unit: str, a: float | None, b: float | None, counts: bool, more_is_better: bool | None = False
) -> ComparisonRow:
    if a is None or b is None:
        return ComparisonRow(label, unit, a, b, None, None, UNKNOWN)
    delta = b - a
    percent = 100 * delta / abs(a) if a else None
    if not counts:
        verdict = NOISE
    elif more_is_better is None:
        verdict = CHANGED
    else:
        verdict = BETTER if (delta > 0) == more_is_better else WORSE
    return ComparisonRow(label, unit, a, b, delta, percent, verdict)


def _is_more_than_pages(a: float | None, b: float | None) -> bool:
    return a is not None and b is not None and abs(b - a) > LEAST_BYTES


def _other_work(a: Result, b: Result) -> str | None:
    """Why a step of one run is not the work of a step of the other; None when it is."""
    if (a.script is None) != (b.script is None):
        return SCRIPT_AND_PRESET
    if a.script is not None and b.script is not None and not a.script.is_of_one_script(b.script):
        return OTHER_SCRIPT
    if _fields(a, "model.") != _fields(b, "model.") or _shapes_differ(a.actual, b.actual):
        return OTHER_MODEL
    lengths = a.knobs.get("seq_len"), b.knobs.get("seq_len")
    if None not in lengths and lengths[0] != lengths[1]:
        return OTHER_SEQ_LEN
    if any(a.knobs.get(name) != b.knobs.get(name) for name in BATCH_KNOBS):
        return OTHER_BATCH
    worlds = a.actual.world_size, b.actual.world_size
    shared_out = None not in worlds and worlds[0] != worlds[1]
    one, other = _knobs(a), _knobs(b)
    return OTHER_DEVICES if shared_out or any(one.get(n) != other.get(n) for n in DEVICE_KNOBS) else None


def _shapes_differ(a: Actual, b: Actual) -> bool:
    """True if a size of the two models is known to differ, as between presets."""
    sizes = zip((a.layers, a.hidden_size, a.vocab_size), (b.layers, b.hidden_size, b.vocab_size), strict=True)
    return any(None not in pair and pair[0] != pair[1] for pair in sizes)


def _knobs(result: Result) -> dict[str, Any]:
    """The knobs of a run; `devices=cpu:2` of a run on the CPU is its count, as on a machine without a GPU."""
    processes = cpu_processes(result.knobs.get("devices"))
    if processes is None or result.actual.device != CPU:
        return result.knobs
    return {**result.knobs, "devices": processes}


def speeds_rank(a: Result, b: Result) -> bool:
    """True if neither run was measured under strict malloc thresholds."""
    return a.measured_under is None and b.measured_under is None


def _watched_differently(a: Result, b: Result) -> bool:
    """True if one run counts the energy of devices that the other did not watch."""
    devices = [{device.get("uuid") for device in result.throttle.devices} for result in (a, b)]
    return a.knobs.get("watch") != b.knobs.get("watch") and devices[0] != devices[1]


def _with_verdict(row: ComparisonRow, verdict: str | None) -> ComparisonRow:
    """The row with another verdict; unchanged without one, and if the figure is not known of both runs."""
    return row if verdict is None or row.delta is None else replace(row, verdict=verdict)


def _ratio_counts(a: float | None, b: float | None, noise: float | None) -> bool:
    """True if the ratio of two figures is over `noise` (a share) and the floor; never if `noise` is None."""
    if a is None or b is None or noise is None:
        return False
    if a <= 0 or b <= 0:
        return a != b
    return abs(math.log(b / a)) > max(noise, math.log1p(RUN_TO_RUN))


def _interval(a: float | None, b: float | None, noise: float | None) -> tuple[float, float] | None:
    """The ratio's interval as percentages of `a`; None without a ratio or a noise to build it from."""
    if a is None or b is None or noise is None or a <= 0 or b <= 0:
        return None
    half = max(noise, math.log1p(RUN_TO_RUN))
    return 100 * (b / a * math.exp(-half) - 1), 100 * (b / a * math.exp(half) - 1)


def _relative_noise(a: Result, b: Result) -> float | None:
    """The smallest significant difference of step times and rates as a share of the figure; None: too few steps."""
    errors = []
    for result in (a, b):
        spread, steps = result.throughput.samples_per_s, result.steps.measured
        if steps < FEW_STEPS or not spread.median or spread.mad is None:
            return None
        errors.append(MEDIAN_ERROR * MAD_TO_SIGMA * (spread.mad / spread.median) / math.sqrt(steps))
    return ERRORS_APART * math.hypot(*errors)


def _notes(a: Result, b: Result) -> Iterator[str]:
    if a.preset != b.preset or a.variant != b.variant:
        yield f"different presets: {a.name} and {b.name}"
    for result in (a, b):
        if result.role == PROBE:
            tried = ", ".join(map(str, result.tried)) or "not on record"
            yield f"{result.run_id} is a search's probe, which tried one batch_size after another: {tried}"
        elif result.role in WARM_ROLES:
            yield f"{result.run_id} tried {len(result.tried)} settings for a search, one after another"
        if result.measured_under is not None:
            yield f"speed is not comparable: that of {result.run_id} was measured under {result.measured_under}"
        if result.state != "finished":
            yield f"{result.run_id} ended {state_words(result.state)}: {result.reason}"
        elif result.steps.measured < FEW_STEPS:
            yield f"{result.run_id} measured {result.steps.measured} steps: too few to tell a difference from noise"
        if result.synthetic_data:
            yield f"{result.run_id} trained on synthetic data: its loss says nothing"
        if result.energy.joules_per_sample is not None and (watched := watched_words(result)):
            yield f"the energy of {result.run_id} is that of {watched}, which it does not use"
        for doubt in doubts(result):
            yield f"{result.run_id} {doubt}"
    if a.actual.device != b.actual.device and a.actual.device and b.actual.device:
        yield f"different devices: {a.actual.device} and {b.actual.device}"
