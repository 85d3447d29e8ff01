"""Records of a run for the diagnosis: healthy but for what a test says."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from on_disk import put, run_file
from trainfast_runner.records.run_lines import Step
from trainfast_runner.records.tick import DeviceReading, HostReading, RunReading
from trainfast_runner.results.bottleneck import MeasuredWindow, diagnose
from trainfast_runner.results.device_conditions import join_of, window_of

S = 1_000_000_000
GIB = 1 << 30
Ramp = Callable[[int], dict[str, Any]]


@dataclass
class Case:
    """Ten steps of 400 ms, one a second, beside ten device samples; what is not said is as a healthy run has it."""

    device: str = "cuda"
    knobs: dict[str, Any] = field(default_factory=dict)
    step: Ramp = lambda n: {}
    other_ranks: dict[int, Ramp] = field(default_factory=dict)
    gpus: dict[int, Ramp] = field(default_factory=dict)
    host: Ramp = lambda n: {}
    run: dict[str, Any] = field(default_factory=dict)

    def window(self):
        healthy = {"strategy": "single", "precision": "bf16", "batch_size": 16, "grad_accum": 1, "workers": 4}
        gpus = self.gpus or ({0: lambda n: {}} if self.device == "cuda" else {})
        uuids = [f"GPU-{index}" for index in gpus]
        placed = {"device_uuids": uuids if self.device == "cuda" else [], "watch_uuids": uuids}
        placed |= {"device": self.device, "world_size": 1 + len(self.other_ranks)}
        run = run_file(**{"knobs": {**healthy, **self.knobs}, **placed, **self.run})
        samples = {f"GPU-{index}": [(n * S, _sample(index, n, of(n))) for n in range(11)] for index, of in gpus.items()}
        ranks = {0: self.step, **self.other_ranks}
        steps = {rank: [_step(n, of(n)) for n in range(1, 11)] for rank, of in ranks.items()}
        times = window_of(steps[0])
        return MeasuredWindow(
            run=run,
            steps=steps,
            devices=join_of(samples, uuids, used_uuids=run.device_uuids).conditions_between(
                times.begin_ns, times.end_ns
            ),
            samples=samples,
            hosts=[_host(self.host(n)) for n in range(10)],
            foreign=run.foreign_processes,
        )

    def write(self, directory):
        """The same as a supervisor and its ranks would have left it on disk."""
        window = self.window()
        put(directory / "run.json", window.run)
        for rank, steps in window.steps.items():
            put(directory / f"steps{f'.rank{rank}' if rank else ''}.jsonl", *steps)
        ticks = []
        for n in range(11):
            devices = [of[n][1] for of in window.samples.values()]
            ticks.append({"t_ns": n * S, "devices": devices, "host": window.hosts[min(n, 9)]})
        put(directory / "telemetry.jsonl", *ticks)

    def findings(self):
        return diagnose(self.window())

    def of(self, rule):
        """The one finding of a rule."""
        (found,) = (finding for finding in self.findings() if finding.rule == rule)
        return found

    def found(self):
        return [finding.rule for finding in self.findings()]


def _step(n, fields):
    healthy = {
        "step_ms": 1000.0, "data_ms": 10.0, "forward_ms": 320.0, "backward_ms": 640.0, "optimizer_ms": 30.0,
        "alloc_retries": 0, "tokens": 16 * 512, "samples": 16,
    }  # fmt: skip
    return Step(t_ns=n * S, step=n, **{**healthy, **fields})


def _sample(index, n, fields):
    healthy = {
        "temperature_c": 70, "slowdown_temperature_c": 92, "gpu_utilization_percent": 97, "sm_clock_mhz": 1950,
        "sm_clock_max_mhz": 1980, "pcie_width": 16, "pcie_width_max": 16, "pcie_generation": 4,
        "pcie_generation_max": 4, "power_w": 300.0, "power_limit_w": 400.0, "throttle_reasons": [],
    }  # fmt: skip
    return DeviceReading(**{"uuid": f"GPU-{index}", "index": index, **healthy, **fields})


def _host(fields):
    own = fields.pop("own_percent", 160.0)
    healthy = {
        "cpu_percent": 25.0, "cpu_count": 8, "memory_total_bytes": 64 * GIB, "memory_available_bytes": 32 * GIB,
        "swap_used_bytes": 0,
    }  # fmt: skip
    return HostReading(run=RunReading(cpu_percent=own, processes=1, threads=1), **{**healthy, **fields})


def always(**fields):
    return lambda n: dict(fields)
