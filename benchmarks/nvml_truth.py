"""Facts about NVML that only a real GPU has: the time of each call, the live counters, the agreement of energy and
power.

    python -m benchmarks.nvml_truth [--seconds 30]

One JSON object, idle and under a load of matrix products (left out where torch sees no GPU), with its judgement under
`judged`. Changes no setting. Exit code 1 when a bound is not held, 2 where NVML has no GPU; a GPU or a call that fails
stands in the object with its error.
"""

import argparse
import contextlib
import itertools
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import pynvml
from benchmarks.budget import Row, at_most

from trainfast_runner.machine.telemetry import binding, throttle
from trainfast_runner.machine.telemetry.binding import Guarded
from trainfast_runner.machine.telemetry.device import Capabilities, Device
from trainfast_runner.machine.telemetry.queries import (
    ALL_LINKS,
    CAUSE_COUNTERS,
    CAUSE_NUMBERS,
    ENERGY_BY_FUNCTION,
    FIELDS,
)
from trainfast_runner.machine.telemetry.throttle import REASONS_OF_COUNTER

nv = Guarded(pynvml)
CALLS = 100
PERIOD_S = 0.1
APART = 0.1
"""Chosen: an A100's and an H100's power sensor looks at a quarter of the time (arXiv 2312.02741)."""
LOAD = """
import time, torch
n = 8192
work = [(torch.randn(n, n, device=f"cuda:{i}", dtype=torch.bfloat16),) * 2 for i in range(torch.cuda.device_count())]
assert work, "no GPU"
print("up", flush=True)
while True:
    for a, b in work:
        a @ b
    for i in range(len(work)):
        torch.cuda.synchronize(i)
"""

Json = dict[str, Any]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="What only a real GPU can tell about NVML.")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of each watch, idle and loaded")
    options = parser.parse_args()
    try:
        nv.nvmlInit()
        count = nv.nvmlDeviceGetCount()
    except nv.NVMLError as error:
        print(f"no GPU: {binding.library_failure(error.value, str(error)).sentence}", file=sys.stderr)
        return 2
    if not count:
        print(f"no GPU: {binding.NO_DEVICES}", file=sys.stderr)
        return 2
    report = examine(options.seconds)
    report["judged"] = judge(report)
    print(json.dumps(report))
    return 0 if all(held for *_, held in report["judged"]) else 1


def judge(report: Json) -> list[Row]:
    """The load ran, counters agree with the sampled reasons, energy with integrated power."""
    rows: list[Row] = [("load", report["load_missing"] or "ran", "runs", report["load_missing"] is None)]
    for situation in ("idle", "loaded"):
        for gpu, watched in enumerate((report[situation] or {}).get("watched", ())):
            where = f"GPU {gpu} {situation}"
            apart = {
                name: abs(shares["share_by_counter"] - shares["share_of_samples"])
                for name, shares in watched.get("counters", {}).items()
                if shares["share_by_counter"] is not None
            }
            if apart:
                worst = max(apart, key=apart.__getitem__)
                rows.append(at_most(f"{where}: {worst} beside the sampled reasons", apart[worst], APART, "", digits=3))
            power_j, energy_j = watched.get("integrated_j", {}).get("power_w"), watched.get("energy_j")
            if power_j and energy_j is not None:
                off = abs(energy_j / power_j - 1)
                rows.append(at_most(f"{where}: energy beside integrated power", off, APART, "", digits=3))
    return rows


def examine(seconds: float) -> Json:
    """All of it, for every GPU that answers. NVML must be open; it is opened once more to see what that takes."""
    devices: list[Device] = []
    silent: Json = {}
    for index in range(nv.nvmlDeviceGetCount()):
        try:
            devices.append(_device(index))
        except nv.NVMLError as error:
            silent[str(index)] = str(error)
    report: Json = {
        "driver": nv.nvmlSystemGetDriverVersion(),
        "nvml": nv.nvmlSystemGetNVMLVersion(),
        "binding": version("nvidia-ml-py"),
        "another_init_us": _timed(nv.nvmlInit),
        "gpus_without_an_answer": silent,
        "gpus": [
            {
                "index": device.index,
                "name": device.name,
                "absent": _capabilities(device).absent,
                "cause_counters_at": _capabilities(device).batch.cause_numbers,
                "moved_fields": _moved_fields(device),
            }
            for device in devices
        ],
        "idle": _situation(devices, seconds),
    }
    with _load() as why_not:
        report["load_missing"] = why_not
        report["loaded"] = None if why_not is not None else _situation(devices, seconds)
    for gpu, device in zip(report["gpus"], devices, strict=True):
        gpu["absent_in_the_end"] = _capabilities(device).absent
    nv.nvmlShutdown()
    return report


def _device(index: int) -> Device:
    handle = nv.nvmlDeviceGetHandleByIndex(index)
    device = Device(index, nv.nvmlDeviceGetUUID(handle))
    device.attach(nv, handle)
    return device


def _capabilities(device: Device) -> Capabilities:
    assert device.capabilities is not None
    return device.capabilities


@contextlib.contextmanager
def _load() -> Iterator[str | None]:
    """Matrix products on every GPU meanwhile; why there is no load, or None."""
    process = subprocess.Popen([sys.executable, "-c", LOAD], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        up = process.stdout.readline()
        if up:
            time.sleep(5)  # the clocks and the one-second averages have to arrive first
        yield None if up else process.stderr.read().strip().rpartition("\n")[2] or "the load ended without a word"
    finally:
        process.kill()
        process.wait()


def _situation(devices: list[Device], seconds: float) -> Json:
    return {"latency_us": [_latencies(device) for device in devices], "watched": _watch(devices, seconds)}


def _latencies(device: Device) -> Json:
    """Median and slowest microseconds of each call that this GPU answers, the two that the sampler avoids included."""
    capabilities = _capabilities(device)
    calls: dict[str, Callable[[], object]] = {
        "+".join(query.fields): lambda ask=ask: ask(nv, device.handle)  # type: ignore[misc]
        for query, ask in {**{ENERGY_BY_FUNCTION: ENERGY_BY_FUNCTION.asks[0]}, **dict(capabilities.queries)}.items()
    }
    calls["field batch of a tick"] = lambda: capabilities.batch.read(nv, device.handle, sparse=False)
    calls["field batch with the sparse ones"] = lambda: capabilities.batch.read(nv, device.handle, sparse=True)
    for field in FIELDS:
        calls[f"field {field.number} alone"] = lambda field=field: nv.nvmlDeviceGetFieldValues(  # type: ignore[misc]
            device.handle, [(field.number, field.scope)]
        )
    calls["avoided: nvmlDeviceGetPcieThroughput"] = lambda: nv.nvmlDeviceGetPcieThroughput(device.handle, 0)
    calls["avoided: nvmlDeviceGetGraphicsRunningProcesses"] = lambda: nv.nvmlDeviceGetGraphicsRunningProcesses(
        device.handle
    )
    calls["whole reading"] = lambda: device.read(nv, time.monotonic_ns(), sparse=True)
    return {name: _timed(call) for name, call in calls.items()}


def _timed(call: Callable[[], object]) -> Json | str:
    times = []
    try:
        for _ in range(CALLS):
            began = time.perf_counter_ns()
            call()
            times.append((time.perf_counter_ns() - began) / 1e3)
    except nv.NVMLError as error:
        return f"{type(error).__name__}: {error}"
    return {"median": statistics.median(times), "max": max(times)}


def _moved_fields(device: Device) -> Json:
    """The raw answers of both field numbers of the moved counters: type, code, value."""
    numbers = [first + place for _, first in CAUSE_NUMBERS for place in range(len(CAUSE_COUNTERS))]
    wanted = [*((number, 0) for number in (74, 75, 76, *numbers)), (138, ALL_LINKS), (197, 0), (198, 0)]
    try:
        entries = nv.nvmlDeviceGetFieldValues(device.handle, wanted)
    except nv.NVMLError as error:
        return {"error": str(error)}
    return {str(entry.fieldId): [entry.valueType, entry.nvmlReturn, entry.value.ullVal] for entry in entries}


def _watch(devices: list[Device], seconds: float) -> list[Json]:
    """Every GPU ten times a second: counters against the sampled reasons, energy against integrated power."""
    seen: list[list[Any]] = [[] for _ in devices]
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        began_s = time.monotonic()
        for device, readings in zip(devices, seen, strict=True):
            # A GPU that is lost in between has fewer samples.
            with contextlib.suppress(nv.NVMLError):
                readings.append(device.read(nv, time.monotonic_ns(), sparse=False)[0])
        time.sleep(max(0.0, began_s + PERIOD_S - time.monotonic()))
    return [_summary(readings) if len(readings) > 1 else {"samples": len(readings)} for readings in seen]


def _summary(readings: list[Any]) -> Json:
    first, last = readings[0], readings[-1]
    wall_ns = last.t_ns - first.t_ns
    counters = {}
    for name, reasons in REASONS_OF_COUNTER.items():
        if not hasattr(first, name):
            continue  # a counter of earlier records
        before, after = getattr(first, name), getattr(last, name)
        shown = [bool(reasons & set(r.throttle_reasons or ())) for r in readings]
        counters[name] = {
            "share_by_counter": None if before is None or after is None else (after - before) / wall_ns,
            "share_of_samples": sum(shown) / len(shown),
        }
    energy = None if first.energy_mj is None or last.energy_mj is None else (last.energy_mj - first.energy_mj) / 1e3
    return {
        "seconds": wall_ns / 1e9,
        "samples": len(readings),
        "counters": counters,
        "reasons_seen": sorted({throttle.cause_text(name) for r in readings for name in r.throttle_reasons or ()}),
        "energy_j": energy,
        "integrated_j": {
            name: _integral(readings, name) for name in ("power_w", "power_average_w", "power_instant_w")
        },
        "temperature_c": [first.temperature_c, last.temperature_c],
        "pcie_bytes": [getattr(last, n) - getattr(first, n) if getattr(last, n) is not None else None
                       for n in ("pcie_tx_bytes", "pcie_rx_bytes")],
    }  # fmt: skip


def _integral(readings: list[Any], name: str) -> float | None:
    """Joules by the trapezoid rule over the samples' own moments."""
    points: list[tuple[float, float]] = [
        (r.t_ns / 1e9, value) for r in readings if (value := getattr(r, name)) is not None
    ]
    if len(points) < 2:
        return None
    return math.fsum((t1 - t0) * (p0 + p1) / 2 for (t0, p0), (t1, p1) in itertools.pairwise(points))


if __name__ == "__main__":
    sys.exit(main())
