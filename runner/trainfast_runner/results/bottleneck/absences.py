"""Times without a reading of a watched GPU: their length, their share of the measured time, counters meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from trainfast_runner.machine.telemetry.throttle_causes import CAUSES
from trainfast_runner.results.bottleneck.device_track import Seen, read
from trainfast_runner.results.bottleneck.device_window import Window

TELLING = ("temperature_c", "energy_mj", "power_w", "sm_clock_mhz", "memory_used_bytes", "throttle_reasons")
"""Readings that some GPU lacks, but none lacks all of."""


def absences(
    devices: Mapping[str, Sequence[tuple[int, Seen]]], uuids: Iterable[str], window: Window | None
) -> list[dict[str, Any]]:
    """Each time in which a watched GPU that had answered gave no reading.

    `device` is its NVML index, `seconds` until it answered again or the records end, `back` is True if it did,
    `measured_fraction` is the share of the measured window, `throttled_ms` the growth of the GPU's own counters by
    cause, from the last reading before to the first one after: without clocks, so in no other figure.
    """
    return [gap for uuid in uuids for gap in _gaps(devices.get(uuid, ()), window)]


def _gaps(samples: Sequence[tuple[int, Seen]], window: Window | None) -> Iterator[dict[str, Any]]:
    before: Seen | None = None
    began_ns: int | None = None
    for t_ns, sample in samples:
        if _is_blank(sample):
            began_ns = t_ns if began_ns is None and before is not None else began_ns
            continue
        if before is not None and began_ns is not None:
            yield _gap(before, sample, began_ns, t_ns, window)
        before, began_ns = sample, None
    if before is not None and began_ns is not None:
        yield _gap(before, None, began_ns, samples[-1][0], window)


def _gap(before: Seen, after: Seen | None, began_ns: int, ended_ns: int, window: Window | None) -> dict[str, Any]:
    covered = 0 if window is None else min(ended_ns, window.end_ns) - max(began_ns, window.begin_ns)
    return {
        "device": before.index,
        "seconds": (ended_ns - began_ns) / 1e9,
        "back": after is not None,
        "measured_fraction": 0.0 if window is None else max(0, covered) / (window.end_ns - window.begin_ns),
        "throttled_ms": {} if after is None else _grown(before, after),
    }


def _grown(before: Seen, after: Seen) -> dict[str, float]:
    """Milliseconds by cause with a grown counter; a counter that the driver reset is left out."""
    found = {}
    for cause in CAUSES:
        fields = [*cause.reason_counters, *([cause.policy_counter] if cause.policy_counter else [])]
        ends = [(first, last) for name in fields if (first := read(before, name)) is not None
                and (last := read(after, name)) is not None]  # fmt: skip
        grown = max((last - first for first, last in ends), default=0.0)
        if grown > 0:
            found[cause.name] = grown / 1e6
    return found


def _is_blank(sample: Seen) -> bool:
    return all(getattr(sample, name, None) is None for name in TELLING)
