"""Times without a reading of a watched GPU: their length, their share of the measured time, counters meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trainfast_runner.machine.telemetry.throttle import CAUSES
from trainfast_runner.results.bottleneck.device_track import DeviceTrack, Outage
from trainfast_runner.results.bottleneck.device_window import Window


def absences(tracks: Iterable[DeviceTrack], window: Window | None) -> list[dict[str, Any]]:
    """Each time in which a watched GPU that had answered gave no reading.

    `device` is its NVML index, `seconds` until it answered again or the records end, `back` is True if it did,
    `measured_fraction` is the share of the measured window, `throttled_ms` the growth of the GPU's own counters by
    cause, from the last reading before to the first one after: without clocks, so in no other figure.
    """
    return [_absence(track.index, outage, window) for track in tracks for outage in track.outages()]


def _absence(index: int | None, outage: Outage, window: Window | None) -> dict[str, Any]:
    began_ns, ended_ns = outage.silent_ns, outage.end_ns
    covered = 0 if window is None else min(ended_ns, window.end_ns) - max(began_ns, window.begin_ns)
    return {
        "device": index,
        "seconds": (ended_ns - began_ns) / 1e9,
        "back": outage.back,
        "measured_fraction": 0.0 if window is None else max(0, covered) / (window.end_ns - window.begin_ns),
        "throttled_ms": {one.name: ns / 1e6 for one in CAUSES if (ns := outage.grown.get(one.name, 0.0)) > 0},
    }
