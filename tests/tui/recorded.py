"""Run directories written by hand, every figure fixed, as a supervisor and its ranks would leave them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from trainfast_runner.machine.telemetry.binding import LIBRARY_FAILURES, LIBRARY_NOT_FOUND
from trainfast_runner.records.home import Home
from trainfast_runner.records.result import (
    Cpu,
    Diagnosis,
    Losses,
    MemoryFigures,
    Result,
    RunError,
    Spread,
    StepCount,
    StepTime,
    Throughput,
)
from trainfast_runner.records.result_conditions import RunConditions
from trainfast_runner.records.run_file import ClockAnchor, RunFile
from trainfast_runner.records.run_lines import Actual, Event, Step
from trainfast_runner.records.tick import DeviceReading, HostReading, RunReading, Tick
from trainfast_runner.records.worker_lines import (
    ActualLine,
    DataLine,
    ExceptionLine,
    PhaseLine,
    StartedLine,
    WorkerLine,
)
from trainfast_runner.settings.knobs import defaults

S = 1_000_000_000
START_NS = 5_000 * S
WALL_NS = 1_790_000_000 * S
GIB = 2**30
MIB = 2**20


def a_step(number: int, *, step_ms: float = 480.0, batch: int = 8, seq_len: int = 128) -> Step:
    """Step `number`; the first three are warm-up and slower, later ones wobble a little."""
    took = step_ms * (2.5 if number == 1 else 1.0 + 0.05 * math.sin(number))
    return Step(
        t_ns=START_NS + 8 * S + int(number * step_ms * 1e6),
        step=number,
        warmup=number <= 3,
        samples=batch,
        tokens=batch * seq_len,
        loss=8.3 * math.exp(-number / 80),
        step_ms=took,
        data_ms=took * 0.02,
        forward_ms=took * 0.31,
        backward_ms=took * 0.52,
        optimizer_ms=took * 0.11,
        other_ms=took * 0.04,
        peak_allocated_bytes=412 * MIB + number * 1000,
        peak_reserved_bytes=412 * MIB + number * 1000,
        lr=1e-3,
    )


def a_gpu(index: int, second: int = 0, **changes: Any) -> DeviceReading:
    """An H200 under load; GPU 3 runs hot and is throttled."""
    hot = index == 3
    fields: dict[str, Any] = {
        "index": index,
        "uuid": f"GPU-{index:08d}",
        "name": "NVIDIA H200",
        "memory_used_bytes": (61 + index) * GIB,
        "memory_total_bytes": 139 * GIB,
        "memory_free_bytes": (78 - index) * GIB,
        "gpu_utilization_percent": 96 + (second + index) % 4,
        "temperature_c": 61 + index + (24 if hot else 0) + second % 3,
        "slowdown_temperature_c": 91,
        "power_w": 610.0 + 7 * index + second % 9,
        "power_limit_w": 700.0,
        "sm_clock_mhz": 1410 if hot else 1830,
        "sm_clock_max_mhz": 1980,
        "throttle_reasons": ["sw_thermal"] if hot else (["sw_power_cap"] if index == 1 else []),
    }
    return DeviceReading(**{**fields, **changes})


def a_tick(second: int, *, gpus: int = 0, live: bool = True) -> Tick:
    """The machine `second` seconds after the start."""
    return Tick(
        t_ns=START_NS + second * S,
        host=HostReading(
            cpu_percent=min(97.0, 12.0 + 8 * second) + 2 * math.sin(second),
            cpu_count=2,
            memory_used_bytes=int((2.6 + 0.02 * second) * GIB),
            memory_total_bytes=int(7.75 * GIB),
            memory_available_bytes=int((7.75 - 2.6 - 0.02 * second) * GIB),
            run=RunReading(
                cpu_percent=min(190.0, 16.0 * second),
                memory_rss_bytes=(420 + 9 * second) * MIB,
                processes=3,
                threads=17,
            )
            if live
            else None,
        ),
        devices=[a_gpu(index, second) for index in range(gpus)],
        missing={} if gpus else {"nvml": LIBRARY_FAILURES[LIBRARY_NOT_FOUND].sentence},
        sample_us=900,
    )


RAMP = range(20, 32)
"""The seconds in which the thermal ramp throttles its GPU."""


def a_ramp_tick(second: int) -> Tick:
    """A CPU run that watches GPU 0, which heats up, is throttled in the seconds of `RAMP`, and cools again."""
    held = second in RAMP
    heat = 55 + 1.6 * second if second < RAMP.start else 87 + (second % 2 if held else 1.5 * (RAMP.stop - second))
    gpu = a_gpu(
        0,
        temperature_c=int(heat),
        sm_clock_mhz=1215 if held else 1980,
        power_w=430.0 if held else 655.0 + second % 7,
        throttle_reasons=["sw_thermal"] if held else (["sw_power_cap"] if second >= 36 else []),
        thermal_violation_ns=S * max(0, min(second, RAMP.stop) - RAMP.start),
        energy_mj=600_000 * second,
    )
    return msgspec.structs.replace(a_tick(second), devices=[gpu], missing={})


def a_thermal_ramp(home: Home, **options: Any) -> Path:
    """A run of 60 steps joined to the GPU of `a_ramp_tick`, with the events its supervisor would have written."""
    directory = a_run(home, steps=60, planned=80, **options)
    run = msgspec.json.decode((directory / "run.json").read_bytes())
    (directory / "run.json").write_bytes(msgspec.json.encode({**run, "watch_uuids": ["GPU-00000000"]}))
    write_lines(directory / "telemetry.jsonl", [a_ramp_tick(second) for second in range(38)])
    events = [
        Event(t_ns=START_NS + 8 * S, kind="state", state="running"),
        Event(t_ns=START_NS + RAMP.start * S, kind="throttle_on", device=0, detail="sw_thermal"),
        Event(t_ns=START_NS + RAMP.stop * S, kind="throttle_off", device=0, detail="sw_thermal"),
        Event(t_ns=START_NS + 36 * S, kind="throttle_on", device=0, detail="sw_power_cap"),
    ]
    write_lines(directory / "events.jsonl", events)
    if (directory / "result.json").exists():
        result = msgspec.json.decode((directory / "result.json").read_bytes(), type=Result)
        conditions = RunConditions(start_temperature_c=55, still_warming=True)
        found = msgspec.structs.replace(result, diagnosis=[HEAT, SMALL_BATCH], conditions=conditions)
        (directory / "result.json").write_bytes(msgspec.json.encode(found))
    return directory


HEAT = Diagnosis(
    rule="thermal",
    line="GPU 0 is throttled by heat for 202 ms of each 493 ms step, at 88 °C, 3 degrees below slowdown",
    advice="more cooling, or a lower power limit",
    severity="warning",
    cost_fraction=0.16,
    figures={
        "thermal_percent": 41.0,
        "thermal_ms_per_step": 202.1,
        "temperature_c": 88,
        "clock_loss_percent": 16.2,
        "thermal_source": "policy",
    },
    device=0,
)
SMALL_BATCH = Diagnosis(
    rule="small_batch",
    line="batch_size 8 is small for tensor cores",
    advice="batch_size 16, if it fits",
    figures={"batch_size": 8, "foreign_memory_bytes": None, "peak_reserved_bytes": 3 * GIB},
)


def write_lines(path: Path, records: list[Any]) -> None:
    """Write one JSON object a line."""
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))


def a_run(
    home: Home,
    run_id: str = "20261121-054455-tiny-llama-7f3a",
    *,
    state: str = "finished",
    steps: int = 30,
    planned: int = 50,
    step_ms: float = 480.0,
    gpus: int = 0,
    reason: str | None = None,
    preset: str = "tiny-llama",
    title: str = "Llama, 4 layers of 192, on this Python's own sources",
    synthetic: bool = False,
    error: RunError | None = None,
    log: str = "tokenizing the standard library\nepoch 1\n",
    knobs: dict[str, Any] | None = None,
    with_result: bool = True,
    memory_limit: list[int] | None = None,
    role: str | None = None,
    predicted_bytes: int | None = None,
    model: dict[str, Any] | None = None,
    changed: tuple[str, ...] = (),
) -> Path:
    """A run directory in `home`; without a result and with its lock held by the test it is live."""
    home.create()
    directory = home.directory(run_id)
    directory.mkdir(mode=0o700)
    chosen = {**defaults(), "seq_len": 128, "lr": 1e-3, "steps": planned, "devices": 1, **(knobs or {})}
    batch = int(str(chosen["batch_size"]))
    run = RunFile(
        run_id=run_id,
        preset=preset,
        title=title,
        model={"family": "llama", **(model or {})},
        overrides=[*changed, *(knobs or {})],
        data={"kind": "random" if synthetic else "text", "objective": "causal-lm"},
        knobs=chosen,
        device="cuda" if gpus else "cpu",
        device_uuids=[f"GPU-{index:08d}" for index in range(gpus)],
        memory_limit_bytes=memory_limit,
        role=role,
        predicted=None if predicted_bytes is None else {"total_bytes": predicted_bytes},
        boot_id="",
        clock=ClockAnchor(monotonic_ns=START_NS, wall_ns=WALL_NS),
    )
    (directory / "run.json").write_bytes(msgspec.json.encode(run))
    (directory / "alive.lock").touch(mode=0o600)
    all_steps = [a_step(number, step_ms=step_ms, batch=batch) for number in range(1, steps + 1)]
    write_lines(directory / "steps.jsonl", all_steps)
    lines: list[WorkerLine] = [
        StartedLine(t_ns=START_NS + S, rank=0, pid=1, start_ticks=1),
        PhaseLine(t_ns=START_NS + 2 * S, phase="data", detail="opening text data"),
        DataLine(t_ns=START_NS + 3 * S, synthetic=synthetic, source="text"),
        PhaseLine(t_ns=START_NS + 4 * S, phase="model", detail=""),
        ActualLine(
            t_ns=START_NS + 7 * S,
            wrapper="none",
            compute_dtype="float32",
            device="cuda" if gpus else "cpu",
            world_size=1,
        ),
        PhaseLine(t_ns=START_NS + 8 * S, phase="train", detail=""),
    ]
    if error is not None:
        lines.append(
            ExceptionLine(
                t_ns=START_NS + 9 * S,
                rank=error.rank,
                phase=error.phase,
                step=steps + 1,
                type=error.type,
                message=error.message,
                is_oom=state == "oom",
            )
        )
    write_lines(directory / "worker.jsonl", lines)
    seconds = 8 + int(steps * step_ms / 1000) + 1
    write_lines(directory / "telemetry.jsonl", [a_tick(second, gpus=gpus) for second in range(seconds)])
    write_lines(directory / "events.jsonl", [Event(t_ns=START_NS, kind="state", state="running")])
    (directory / "output.log").write_text(log)
    if with_result:
        result = a_result(run, all_steps, state, reason, synthetic, error)
        (directory / "result.json").write_bytes(msgspec.json.encode(result))
    return directory


def a_result(
    run: RunFile, steps: list[Step], state: str, reason: str | None, synthetic: bool, error: RunError | None
) -> Result:
    """The result as the supervisor would sum it up."""
    counted = [step for step in steps if not step.warmup]
    middle = counted[len(counted) // 2] if counted else None
    rate = middle.samples / middle.step_ms * 1e3 if middle else None
    tokens = middle.tokens / middle.step_ms * 1e3 if middle else None
    return Result(
        run_id=run.run_id,
        role=run.role,
        diagnosed=True,
        state=state,
        reason=reason if reason is not None else f"{len(steps)} of {run.knobs['steps']} steps",
        preset=run.preset,
        synthetic_data=synthetic,
        started_wall_ns=WALL_NS,
        seconds=8 + len(steps) * 0.5,
        knobs=run.knobs,
        overrides=run.override_values(),
        actual=Actual(wrapper="none", world_size=1, device=run.device),
        steps=StepCount(measured=len(counted), warmup=len(steps) - len(counted)),
        loss=Losses(first=8.1, last=5.7) if steps else Losses(),
        throughput=Throughput(
            samples_per_s=Spread(median=rate, mad=rate and rate * 0.01),
            tokens_per_s=Spread(median=tokens, mad=tokens and tokens * 0.01),
        ),
        step_ms=StepTime(
            p50=middle.step_ms,
            p90=middle.step_ms * 1.04,
            p99=middle.step_ms * 1.05,
            data=middle.data_ms,
            forward=middle.forward_ms,
            backward=middle.backward_ms,
            optimizer=middle.optimizer_ms,
            other=middle.other_ms,
        )
        if middle
        else StepTime(),
        memory=MemoryFigures(
            peak_allocated_bytes=steps[-1].peak_allocated_bytes if steps else None,
            peak_reserved_bytes=steps[-1].peak_reserved_bytes if steps else None,
            predicted_bytes=(run.predicted or {}).get("total_bytes"),
        ),
        cpu=Cpu(allocator="glibc 2.36", thresholds="strict in warm-up", threads=2, wait_policy="default"),
        error=error,
    )


OOM_WORDS = (
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 6442450944 bytes. Error code 12"
    " (Cannot allocate memory)"
)


def an_oom_run(home: Home, run_id: str = "20261121-060102-tiny-llama-00aa") -> Path:
    """A run that did not fit, in its first step."""
    return a_run(
        home,
        run_id,
        state="oom",
        steps=0,
        reason=OOM_WORDS,
        error=RunError(rank=0, phase="forward", type="RuntimeError", message=OOM_WORDS),
        knobs={"batch_size": 4096, "memory_limit": "1GiB"},
        memory_limit=[GIB],
    )
