"""Facts about NVML that only a real GPU has: its counters beside the sampled reasons, its energy beside its power.

    python -m benchmarks.nvml_truth [--seconds 30]

One JSON object, idle and under a load of matrix products (left out where torch sees no GPU), with its judgement under
`judged`. Changes no setting. Exit code 1 when a bound is not held, 2 where NVML has no GPU; a GPU or a call that fails
stands in the object with its error.
"""

import contextlib
import itertools
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from benchmarks.meter import Json, Row, at_most, options

from trainfast_runner.machine.telemetry import binding
from trainfast_runner.machine.telemetry.binding import NvmlError, NvmlFailure, call
from trainfast_runner.machine.telemetry.device import Device
from trainfast_runner.machine.telemetry.throttle import REASONS_OF_COUNTER
from trainfast_runner.records.tick import DeviceReading

PERIOD_S = 0.1
CLOCKS_RISE_S = 5.0
"""The clocks and the one-second averages have to arrive before a load is watched."""
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


def main() -> int:
    """The command line; `--seconds` are of each watch, idle and loaded."""
    asked = options(__doc__, seconds=30.0).parse_args()
    report = binding.ask_once(lambda nv: examine(nv, asked.seconds))
    if isinstance(report, NvmlFailure):
        print(f"no GPU: {report.sentence}", file=sys.stderr)
        return 2
    report["judged"] = judge(report)
    print(json.dumps(report))
    return 0 if all(held for *_, held in report["judged"]) else 1


def examine(nv: ModuleType, seconds: float) -> Json:
    """All of it, for every GPU that answers. NVML must be open. Raises NvmlError without a GPU."""
    devices, silent = list[Device](), {}
    for index in range(binding.gpu_count(nv)):
        try:
            handle = call(nv.nvmlDeviceGetHandleByIndex, index)
            device = Device(index, call(binding.uuid_of, nv, handle))
            device.attach(nv, handle)
            devices.append(device)
        except NvmlError as error:
            silent[str(index)] = str(error)
    report: Json = {"driver": call(binding.driver_version, nv), "nvml": call(nv.nvmlSystemGetNVMLVersion)}
    report |= {"gpus_without_an_answer": silent, "idle": _watch(nv, devices, seconds)}
    with _load() as why_not:
        report["load_missing"] = why_not
        report["loaded"] = None if why_not is not None else _watch(nv, devices, seconds)
    report["gpus"] = [{"index": device.index, "name": device.name, "absent": device.reasons} for device in devices]
    return report


def judge(report: Json) -> list[Row]:
    """The load ran, counters agree with the sampled reasons, energy with integrated power."""
    rows: list[Row] = [("load", report["load_missing"] or "ran", "runs", report["load_missing"] is None)]
    for situation in ("idle", "loaded"):
        for gpu, watched in enumerate(report[situation] or ()):
            where = f"GPU {gpu} {situation}"
            apart = {
                name: abs(shares["share_by_counter"] - shares["share_of_samples"])
                for name, shares in watched.get("counters", {}).items()
                if shares["share_by_counter"] is not None
            }
            if apart:
                worst = max(apart, key=apart.__getitem__)
                rows.append(at_most(f"{where}: {worst} beside the sampled reasons", apart[worst], APART, "", digits=3))
            power_j, energy_j = watched.get("integrated_power_j"), watched.get("energy_j")
            if power_j and energy_j is not None:
                off = abs(energy_j / power_j - 1)
                rows.append(at_most(f"{where}: energy beside integrated power", off, APART, "", digits=3))
    return rows


@contextlib.contextmanager
def _load() -> Iterator[str | None]:
    """Matrix products on every GPU meanwhile; why there is no load, or None."""
    command = [sys.executable, "-c", LOAD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            if process.stdout.readline():
                time.sleep(CLOCKS_RISE_S)
                yield None
            else:
                yield process.stderr.read().strip().rpartition("\n")[2] or "the load exited without reporting an error"
        finally:
            process.kill()


def _watch(nv: ModuleType, devices: Sequence[Device], seconds: float) -> list[Json]:
    """The summary of every GPU's readings, ten times a second."""
    seen = [list[DeviceReading]() for _ in devices]
    end_s = time.monotonic() + seconds
    while (began_s := time.monotonic()) < end_s:
        for device, readings in zip(devices, seen, strict=True):
            # A GPU that is lost in between has fewer samples.
            with contextlib.suppress(NvmlError):
                readings.append(device.read(nv, time.monotonic_ns(), sparse=False)[0])
        time.sleep(max(0.0, began_s + PERIOD_S - time.monotonic()))
    return [_summary(readings) if len(readings) > 1 else {} for readings in seen]


def _summary(readings: Sequence[Any]) -> Json:
    """Counters against the sampled reasons, energy against power integrated by the trapezoid rule."""
    first, last = readings[0], readings[-1]
    wall_ns, counters = last.t_ns - first.t_ns, {}
    for name, reasons in REASONS_OF_COUNTER.items():
        # Counters of earlier records are no fields of a reading.
        before, after = getattr(first, name, None), getattr(last, name, None)
        shown = [bool(reasons & set(r.throttle_reasons or ())) for r in readings]
        by_counter = None if before is None or after is None else (after - before) / wall_ns
        counters[name] = {"share_by_counter": by_counter, "share_of_samples": sum(shown) / len(shown)}
    powers = [(r.t_ns / 1e9, r.power_w) for r in readings if r.power_w is not None]
    energy_mj = None if first.energy_mj is None or last.energy_mj is None else last.energy_mj - first.energy_mj
    return {
        "seconds": wall_ns / 1e9,
        "samples": len(readings),
        "counters": counters,
        "energy_j": None if energy_mj is None else energy_mj / 1e3,
        "integrated_power_j": math.fsum((t1 - t0) * (p0 + p1) / 2 for (t0, p0), (t1, p1) in itertools.pairwise(powers)),
    }


if __name__ == "__main__":
    sys.exit(main())
