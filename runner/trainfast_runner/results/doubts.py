"""Conditions of a run that make its figures doubtful, in words that follow the run's name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trainfast_runner.machine.telemetry.throttle import CAUSES
from trainfast_runner.records.result import Result
from trainfast_runner.records.result_conditions import RunConditions
from trainfast_runner.results.bottleneck.rules import OTHERS_CPU_PERCENT
from trainfast_runner.results.bottleneck.steady_state import drift_text
from trainfast_runner.results.device_conditions.rate import MIN_COVERED
from trainfast_runner.units import counted, gpus_text

THROTTLED_SHARE = 0.0005
"""Least share of the measured time that is shown: a smaller one would read 0.0 %."""


def watched_text(result: Result) -> str:
    """The GPUs that were only joined to a run on the CPU, such as "watched GPU 0"; empty for a run on GPUs."""
    if result.actual.device != "cpu":
        return ""
    return watched_gpus([row.index for row in result.throttle.devices])


def watched_gpus(indexes: Iterable[int | None]) -> str:
    """GPUs by their NVML indexes, such as "watched GPUs 1 and 3"; empty without any."""
    known_indexes = [index for index in indexes if index is not None]
    return f"watched {gpus_text(known_indexes)}" if known_indexes else ""


def doubts(result: Result) -> Iterator[str]:
    """Predicates of the run, such as "was throttled by heat for 12.0 % of the measured time"."""
    conditions = result.conditions
    if conditions.started_clean is False:
        yield "started before the device had freed the last run's memory"
    elif not conditions.clean and conditions.started_clean is None:
        yield "started before the device had freed the last run's memory, or lost the device later"
    yield from _outages(result)
    for error in conditions.xid_errors:
        yield f"saw an Xid error on {_gpu(result, error.device)}" + (f": {error.detail}" if error.detail else "")
    others = len(conditions.foreign_processes)
    if others:
        device = "watched GPU" if result.actual.device == "cpu" else "device"
        yield f"shared its {device} with {counted(others, 'other process', 'other processes')}"
    others_percent = conditions.others_cpu_percent
    if result.actual.device == "cpu" and others_percent is not None and others_percent >= OTHERS_CPU_PERCENT:
        yield f"shared the CPU: other processes took {others_percent:.0f} % of it"
    for cause in CAUSES:
        fraction = getattr(result.throttle, f"{cause.name}_fraction")
        if fraction is not None and fraction >= THROTTLED_SHARE:
            on_gpu, source = _worst_gpu(result, cause.name, fraction)
            yield f"was throttled by {cause.text}{on_gpu} for {100 * fraction:.1f} % of the measured time{source}"
    if (text := _steadiness(conditions, result.steps.warmup)) is not None:
        yield text


def _outages(result: Result) -> Iterator[str]:
    """A predicate for each time without readings of a GPU: its length, its share, and the growth of counters."""
    for outage in result.conditions.outages:
        length = "" if outage.seconds is None else f" for {outage.seconds:.0f} s"
        end_text = "" if outage.back else ", to the end"
        text = f"had no reading of {_gpu(result, outage.device)}{length}{end_text}"
        if outage.measured_fraction >= THROTTLED_SHARE:
            text += f", {100 * outage.measured_fraction:.0f} % of the measured time"
        grown = [
            f"{outage.throttled_ms[cause.name] / 1e3:.1f} s by {cause.text}"
            for cause in CAUSES
            if cause.name in outage.throttled_ms
        ]
        if grown:
            text += f"; by its counters it was throttled meanwhile: {', '.join(grown)}"
        if outage.measured_fraction >= 1 - MIN_COVERED:
            text += "; the rest is too short for figures of throttled time and energy"
        yield text


def doubt_marks(result: Result) -> Iterator[str]:
    """Short names of the doubts, shown beside a figure."""
    if any((getattr(result.throttle, f"{cause.name}_fraction") or 0) >= THROTTLED_SHARE for cause in CAUSES):
        yield "throttled"
    if result.conditions.foreign_processes:
        yield "shared"
    if result.conditions.still_warming:
        yield drift_text(result.conditions.temperature_slope_c_per_min)


def _steadiness(conditions: RunConditions, warmup: int) -> str | None:
    """A predicate about warm-up; None if the run was steady from the first measured step on, or if unknown."""
    drifts = []
    if conditions.temperature_slope_c_per_min is not None:
        drifts.append(f"{conditions.temperature_slope_c_per_min:+.1f} °C a minute")
    if conditions.step_drift_percent is not None:
        drifts.append(f"step time {conditions.step_drift_percent:+.1f} %")
    if conditions.still_warming:
        details = f" ({', '.join(drifts)})" if drifts else ""
        drift = drift_text(conditions.temperature_slope_c_per_min)
        return f"was {drift} in its second half{details}: run more steps for steady figures"
    if conditions.steady_from_step is not None and conditions.steady_from_step > warmup + 1:
        steady = f"was steady from step {conditions.steady_from_step} on"
        return f"{steady}; its figures include the measured steps before that"
    return None


def _gpu(result: Result, index: int | None) -> str:
    gpu = "watched GPU" if result.actual.device == "cpu" else "GPU"
    return f"a {gpu}" if index is None else f"{gpu} {index}"


def _worst_gpu(result: Result, cause: str, fraction: float) -> tuple[str, str]:
    """The GPU of a share, and the share's source, in words."""
    for row in result.throttle.devices:
        if getattr(row, f"{cause}_fraction") == fraction:
            on_gpu = "" if row.index is None else f" on {_gpu(result, row.index)}"
            source = getattr(row, f"{cause}_source")
            return on_gpu, f" ({source})" if source else ""
    return "", ""
