"""Conditions of a run that make its figures doubtful, in words that follow the run's name.

`doubts` alone decides: screens, history, comparisons, searches and `result.json` show its verdict.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from trainfast_runner.machine.telemetry.throttle import CAUSES
from trainfast_runner.records.result import MIN_STEPS_TO_COMPARE, Doubt, Result, RunConditions
from trainfast_runner.results.bottleneck_rules import OTHERS_CPU_PERCENT
from trainfast_runner.results.distributions import drift_text, is_cooling_down
from trainfast_runner.units import CPU, counted, gpus_text

THROTTLED_SHARE = 0.0005
"""Least share of the measured time that is shown: a smaller one would read 0.0 %."""
DOUBTFUL_THROTTLED_SHARE = 0.02
"""Share of the measured time from which throttling makes figures doubtful: two equal runs differ by as much."""
LEAST_MEAN = 0.8
"""Chosen, not measured: least mean rate, as a share of the median one, of a run whose median step speaks for it."""
THROTTLING_KINDS = {"thermal": "heat", "brake": "power_brake"}
"""The kinds of doubt by the cause of throttling. The power limit is the ordinary state of a GPU under load."""
WATCHED = "watched_gpu"
QUALIFYING_KINDS = (WATCHED, "throttled")
"""Kinds of notes that stand beside the figures and leave no doubt about them."""


def watched_text(result: Result) -> str:
    """The GPUs that were only joined to a run on the CPU, such as "watched GPU 0"; empty for a run on GPUs."""
    if result.actual.device != "cpu":
        return ""
    return watched_gpus([row.index for row in result.throttle.devices])


def watched_gpus(indexes: Iterable[int | None]) -> str:
    """GPUs by their NVML indexes, such as "watched GPUs 1 and 3"; empty without any."""
    known_indexes = [index for index in indexes if index is not None]
    return f"watched {gpus_text(known_indexes)}" if known_indexes else ""


def with_doubts(result: Result) -> Result:
    """The result with its `doubts`."""
    return msgspec.structs.replace(result, doubts=doubts(result))


def doubts(result: Result) -> list[Doubt]:
    """The conditions that make the figures doubtful; empty if the figures stand."""
    return [Doubt(kind=kind, text=text) for kind, text in _observations(result) if kind not in QUALIFYING_KINDS]


def qualifications(result: Result) -> list[str]:
    """Predicates of the run that belong beside its figures and leave them as good as they are."""
    return [text for kind, text in _observations(result) if kind in QUALIFYING_KINDS]


def _observations(result: Result) -> Iterator[tuple[str, str]]:
    """Kinds and predicates, such as "was throttled by heat for 12.0 % of the measured time".

    A GPU that a run on the CPU only watches does not change the run's speed.
    """
    conditions, on_cpu, measured = result.conditions, result.actual.device == CPU, result.steps.measured
    if conditions.started_clean is False:
        yield "memory_not_freed", "started before the device had freed the last run's memory"
    elif not conditions.clean and conditions.started_clean is None:
        yield "memory_not_freed", "started before the device had freed the last run's memory, or lost the device later"
    for text in _outages(result):
        yield WATCHED if on_cpu else "no_reading", text
    for error in conditions.xid_errors:
        detail = f": {error.detail}" if error.detail else ""
        yield WATCHED if on_cpu else "xid_error", f"saw an Xid error on {_gpu(result, error.device)}{detail}"
    others = len(conditions.foreign_processes)
    if others:
        device = "watched GPU" if on_cpu else "device"
        text = f"shared its {device} with {counted(others, 'other process', 'other processes')}"
        yield WATCHED if on_cpu else "shared_gpu", text
    for cause in CAUSES:
        fraction = getattr(result.throttle, f"{cause.name}_fraction")
        if fraction is not None and fraction >= THROTTLED_SHARE:
            on_gpu = _worst_gpu(result, cause.name, fraction)
            text = f"was throttled by {cause.text}{on_gpu} for {100 * fraction:.1f} % of the measured time"
            is_doubtful = cause.name in THROTTLING_KINDS and fraction >= DOUBTFUL_THROTTLED_SHARE and not on_cpu
            yield THROTTLING_KINDS[cause.name] if is_doubtful else "throttled", text
    # The CPU that others take slows a run on a GPU only where the cores were all busy.
    is_short = result.actual.device != "cuda" or any(found.rule == "host-cpu" for found in result.diagnosis)
    if is_short and (others_percent := conditions.others_cpu_percent or 0.0) >= OTHERS_CPU_PERCENT:
        yield "other_processes", f"shared the CPU: other processes took {others_percent:.0f} % of it"
    if conditions.still_warming:
        is_cooling = is_cooling_down(conditions.temperature_slope_c_per_min)
        yield "cooling_down" if is_cooling else "warming_up", _warming_text(conditions)
    rate = result.throughput.samples_per_s
    if measured >= MIN_STEPS_TO_COMPARE and rate.mean and rate.median and rate.mean < LEAST_MEAN * rate.median:
        text = f"trained {rate.mean:.3g} samples/s over all its measured time: its median step, at {rate.median:.3g}"
        yield "uneven_speed", f"{text} samples/s, is not typical"
    if 0 < measured < MIN_STEPS_TO_COMPARE:
        yield "few_steps", f"measured {counted(measured, 'step')}: too few to tell a difference from noise"
    if (difference := result.loss_difference) is not None and difference.excess:
        yield "other_loss", f"may not train the same as {difference.against}: {difference.excess}"
    if measured and result.measured_under is not None:
        yield "strict_malloc", f"was measured under {result.measured_under}: its speed is not comparable"


def _outages(result: Result) -> Iterator[str]:
    """A predicate for each time without readings of a GPU: its length and its share."""
    for outage in result.conditions.outages:
        length = "" if outage.seconds is None else f" for {outage.seconds:.0f} s"
        end_text = "" if outage.back else ", to the end"
        text = f"had no reading of {_gpu(result, outage.device)}{length}{end_text}"
        if outage.measured_fraction >= THROTTLED_SHARE:
            text += f", {100 * outage.measured_fraction:.0f} % of the measured time"
        yield text


def _warming_text(conditions: RunConditions) -> str:
    """A predicate about a run that had not settled at its end."""
    drifts = []
    if conditions.temperature_slope_c_per_min is not None:
        drifts.append(f"{conditions.temperature_slope_c_per_min:+.1f} °C a minute")
    if conditions.step_drift_percent is not None:
        drifts.append(f"step time {conditions.step_drift_percent:+.1f} %")
    details = f" ({', '.join(drifts)})" if drifts else ""
    drift = drift_text(conditions.temperature_slope_c_per_min)
    return f"was {drift} in its second half{details}: run more steps for steady figures"


def _gpu(result: Result, index: int | None) -> str:
    gpu = "watched GPU" if result.actual.device == "cpu" else "GPU"
    return f"a {gpu}" if index is None else f"{gpu} {index}"


def _worst_gpu(result: Result, cause: str, fraction: float) -> str:
    """The GPU of a share, in words; empty if its index is unknown."""
    rows = (row for row in result.throttle.devices if getattr(row, f"{cause}_fraction") == fraction)
    index = next((row.index for row in rows), None)
    return "" if index is None else f" on {_gpu(result, index)}"
