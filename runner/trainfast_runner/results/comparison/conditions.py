"""The conditions of two runs side by side, and which of them may explain a difference in their figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from trainfast_runner.machine.devices_knob import CPU
from trainfast_runner.machine.telemetry.throttle import CAUSES
from trainfast_runner.records.result import Result
from trainfast_runner.results.bottleneck.steady_state import drift_text

TEMPERATURE_APART_C = 10.0
"""Chosen, not measured: degrees C between two GPUs' starts from which they may differ in clock."""
THROTTLED_APART = 0.02
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
    return [row for row in _condition_rows(a, b) if row.a is not None or row.b is not None]


def _condition_rows(a: Result, b: Result) -> Iterator[ConditionRow]:
    clock_losses = a.throttle.clock_loss_fraction, b.throttle.clock_loss_fraction
    # Heat slows a run by its clocks alone.
    same_clocks = None not in clock_losses and not _apart(*clock_losses, THROTTLED_APART)
    temperature_apart_c = math.inf if same_clocks else TEMPERATURE_APART_C
    starts_c = a.conditions.start_temperature_c, b.conditions.start_temperature_c
    yield _figure_row("start temperature", starts_c, _celsius, temperature_apart_c)
    measured_from_c = a.conditions.measured_from_temperature_c, b.conditions.measured_from_temperature_c
    yield _figure_row("temperature as measuring began", measured_from_c, _celsius, temperature_apart_c)
    for cause in CAUSES:
        shares = getattr(a.throttle, f"{cause.name}_fraction"), getattr(b.throttle, f"{cause.name}_fraction")
        if any(shares):
            # Other settings draw other power: that difference is theirs.
            by_settings = cause.name == "power" and (a.knobs, a.overrides) != (b.knobs, b.overrides)
            apart = math.inf if by_settings else THROTTLED_APART
            yield _figure_row(f"throttled by {cause.text}", shares, _share, apart)
    process_counts = [len(result.conditions.foreign_processes) for result in (a, b)]
    if any(process_counts):
        yield ConditionRow(
            "other processes", str(process_counts[0]), str(process_counts[1]), process_counts[0] != process_counts[1]
        )
    others_percent = a.conditions.others_cpu_percent, b.conditions.others_cpu_percent
    # A run on a GPU leaves most of the cores to others anyway.
    on_cpu = CPU in (a.actual.device, b.actual.device)
    yield ConditionRow(
        "CPU taken by others",
        _percent(others_percent[0]),
        _percent(others_percent[1]),
        on_cpu and _left_apart(*others_percent),
    )
    for row in (
        _text_row("malloc thresholds", a, b, lambda result: result.cpu.thresholds if result.cpu else None),
        _text_row("OpenMP wait policy", a, b, lambda result: result.cpu.wait_policy if result.cpu else None),
    ):
        if row.differs:
            yield row
    yield _text_row("driver", a, b, lambda result: result.conditions.driver)
    yield _text_row("GPU memory free at start", a, b, _free_at_start)
    outages = _outage_fraction(a), _outage_fraction(b)
    if any(outages):
        yield _figure_row("GPU without a reading", outages, _share, THROTTLED_APART)
    warming = a.conditions.still_warming, b.conditions.still_warming
    yield ConditionRow("steady", _steady(a), _steady(b), None not in warming and warming[0] != warming[1])


def _free_at_start(result: Result) -> str | None:
    """`yes` if the GPUs had freed the memory of the run before; None for a run on the CPU, which waits for none."""
    conditions = result.conditions
    if result.actual.device == CPU:
        return None
    clean = conditions.clean if conditions.started_clean is None else conditions.started_clean
    return "yes" if clean else "no"


def _outage_fraction(result: Result) -> float:
    """The share of the measured time in which one of the watched GPUs gave no reading, at its longest."""
    return max((outage.measured_fraction for outage in result.conditions.outages), default=0.0)


def _text_row(label: str, a: Result, b: Result, text_of: Callable[[Result], str | None]) -> ConditionRow:
    text_a, text_b = text_of(a), text_of(b)
    return ConditionRow(label, text_a, text_b, None not in (text_a, text_b) and text_a != text_b)


def _figure_row(
    label: str,
    figures: tuple[float | None, float | None],
    text_of: Callable[[float | None], str | None],
    least_difference: float,
) -> ConditionRow:
    """The row of a figure of both runs, which differs if the two are further apart than `least_difference`."""
    a, b = figures
    return ConditionRow(label, text_of(a), text_of(b), _apart(a, b, least_difference))


def _apart(a: float | None, b: float | None, least_difference: float) -> bool:
    return a is not None and b is not None and abs(a - b) > least_difference


def _left_apart(a: float | None, b: float | None) -> bool:
    """True if the CPU left by others differs: 89 % and 85 % taken leave 11 and 15, a third more."""
    if a is None or b is None:
        return False
    left_percent = [max(1.0, 100 - others_percent) for others_percent in (a, b)]
    return max(left_percent) / min(left_percent) > 1 + CPU_LEFT_APART


def _celsius(value: float | None) -> str | None:
    return None if value is None else f"{value:.0f} °C"


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{value:.0f} %"


def _share(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.1f} % of the time"


def _steady(result: Result) -> str | None:
    conditions = result.conditions
    if conditions.still_warming is None:
        return None
    drift = drift_text(conditions.temperature_slope_c_per_min)
    return drift if conditions.still_warming else f"from step {conditions.steady_from_step}"
