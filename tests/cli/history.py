"""Writes ended runs as a supervisor leaves them, so that history can be read without training."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from trainfast_runner.machine.processes import boot_id
from trainfast_runner.records.result import Cpu, MemoryFigures, Result, Spread, StepCount, StepTime, Throughput
from trainfast_runner.records.result_conditions import RunConditions
from trainfast_runner.records.run_file import ClockAnchor, RunFile
from trainfast_runner.records.run_lines import Actual, Step
from trainfast_runner.results.doubts import with_doubts
from trainfast_runner.settings.knobs import defaults

STARTED_NS = 1_795_000_000_000_000_000


def result(run_id: str, *, samples_per_s: float = 100.0, mad: float = 1.0, steps: int = 40, **fields: Any) -> Result:
    """A finished run of tiny-llama with a batch of 8; `knobs` are laid over the defaults."""
    knobs = {**defaults(), **fields.pop("knobs", {})}
    step_ms = 8e3 / samples_per_s
    given: dict[str, Any] = {
        "state": "finished",
        "preset": "tiny-llama",
        "started_wall_ns": STARTED_NS,
        "seconds": 12.5,
        "synthetic_data": False,
        "steps": StepCount(measured=steps, warmup=3),
        "throughput": Throughput(
            samples_per_s=Spread(median=samples_per_s, mad=mad),
            tokens_per_s=Spread(median=samples_per_s * 128, mad=mad * 128),
        ),
        "step_ms": StepTime(p50=step_ms, p90=step_ms, p99=step_ms, forward=step_ms / 3, backward=step_ms / 2),
        "memory": MemoryFigures(peak_allocated_bytes=200 << 20, peak_reserved_bytes=200 << 20),
        "actual": Actual(device="cpu", world_size=1),
        "conditions": RunConditions(),
        "cpu": Cpu(thresholds="strict in warm-up"),
        **fields,
    }
    return Result(run_id=run_id, knobs=knobs, **given)


def write(home: Path, one: Result) -> None:
    """Put it into a home."""
    directory = home / "runs" / one.run_id
    directory.mkdir(parents=True)
    (directory / "result.json").write_bytes(msgspec.json.encode(with_doubts(one)))
    (directory / "alive.lock").touch()


def write_lost(home: Path, run_id: str, steps: int) -> None:
    """A run whose machine went down: records without an end."""
    directory = home / "runs" / run_id
    directory.mkdir(parents=True)
    run = RunFile(
        run_id=run_id,
        preset="tiny-llama",
        knobs=dict(defaults()),
        boot_id=boot_id(),
        clock=ClockAnchor(monotonic_ns=time.monotonic_ns(), wall_ns=STARTED_NS),
    )
    (directory / "run.json").write_bytes(msgspec.json.encode(run))
    (directory / "alive.lock").touch()
    lines = [
        msgspec.json.encode(
            Step(t_ns=run.clock.monotonic_ns + step, step=step, warmup=step <= 3, samples=8, tokens=1024, step_ms=80.0)
        )
        for step in range(1, steps + 1)
    ]
    # The last line is cut short, as a power failure leaves it.
    (directory / "steps.jsonl").write_bytes(b"\n".join(lines) + b'\n{"t_ns": 12')
