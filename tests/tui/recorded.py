"""Runs, searches and a machine written by hand, every figure fixed, as their own processes would leave them."""

import math
import os
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from on_disk import put
from trainfast_runner.machine.processes import Identity, ProcessRow, identify
from trainfast_runner.machine.telemetry.binding import LIBRARY_FAILURES, LIBRARY_NOT_FOUND
from trainfast_runner.memory.oom import explain_run, out_of_memory_of
from trainfast_runner.records import worker_lines
from trainfast_runner.records.home import Home
from trainfast_runner.records.json_lines import read_all
from trainfast_runner.records.result import (
    Cpu,
    Diagnosis,
    Losses,
    MemoryFigures,
    Result,
    RunConditions,
    RunError,
    Spread,
    StepCount,
    StepTime,
    Throughput,
)
from trainfast_runner.records.run_directory import read_records, read_result, read_run_file
from trainfast_runner.records.run_file import ClockAnchor, Prediction, RunFile
from trainfast_runner.records.run_lines import Actual, Event, Step
from trainfast_runner.records.tick import DeviceReading, HostReading, RunReading, Tick
from trainfast_runner.records.worker_lines import ActualLine, DataLine, PhaseLine, StartedLine, WorkerLine
from trainfast_runner.search.batch_journal import BatchLine, BatchQuestion, BatchSnapshot, Probe, RankPeaks
from trainfast_runner.search.best.answer import BestSoFar
from trainfast_runner.search.best_journal import BestLine, BestQuestion, Space, Trial
from trainfast_runner.search.journal import Conducted, JournalFollower
from trainfast_runner.settings.knobs import defaults
from trainfast_runner.settings.spec import resolve

S = 1_000_000_000
START_NS = 5_000 * S
WALL_NS = 1_790_000_000 * S
GIB = 2**30
MIB = 2**20


def a_step(number: int, *, step_ms: float = 480.0, batch: int = 8, seq_len: int = 128) -> Step:
    """Step `number`; the first three are warm-up and slower, later ones wobble a little."""
    took = step_ms * (2.5 if number == 1 else 1.0 + 0.05 * math.sin(number))
    return Step(
        t_ns=START_NS + 8 * S + int(number * step_ms * 1e6), step=number, warmup=number <= 3, samples=batch,
        tokens=batch * seq_len, loss=8.3 * math.exp(-number / 80), step_ms=took, data_ms=took * 0.02,
        forward_ms=took * 0.31, backward_ms=took * 0.52, optimizer_ms=took * 0.11, other_ms=took * 0.04,
        peak_allocated_bytes=412 * MIB + number * 1000, peak_reserved_bytes=412 * MIB + number * 1000, lr=1e-3,
    )  # fmt: skip


def a_gpu(index: int, second: int = 0, **changes: Any) -> DeviceReading:
    """An H200 under load; GPU 3 runs hot and is throttled."""
    hot = index == 3
    fields: dict[str, Any] = {
        "index": index, "uuid": f"GPU-{index:08d}", "name": "NVIDIA H200", "memory_used_bytes": (61 + index) * GIB,
        "memory_total_bytes": 139 * GIB, "memory_free_bytes": (78 - index) * GIB,
        "gpu_utilization_percent": 96 + (second + index) % 4,
        "temperature_c": 61 + index + (24 if hot else 0) + second % 3, "slowdown_temperature_c": 91,
        "power_w": 610.0 + 7 * index + second % 9, "power_limit_w": 700.0, "sm_clock_mhz": 1410 if hot else 1830,
        "sm_clock_max_mhz": 1980,
        "throttle_reasons": ["sw_thermal"] if hot else (["sw_power_cap"] if index == 1 else []),
    }  # fmt: skip
    values = {**fields, **changes}
    if values["temperature_c"] is not None and values["slowdown_temperature_c"] is not None:
        values.setdefault("degrees_to_slowdown_c", values["slowdown_temperature_c"] - values["temperature_c"])
    return DeviceReading(**values)


def a_tick(second: int, *, gpus: int = 0, live: bool = True) -> Tick:
    """The machine `second` seconds after the start."""
    own_bytes = (420 + 9 * second) * MIB
    run = RunReading(cpu_percent=min(190.0, 16.0 * second), memory_rss_bytes=own_bytes, processes=3, threads=17)
    host = HostReading(
        cpu_percent=min(97.0, 12.0 + 8 * second) + 2 * math.sin(second), cpu_count=2,
        memory_used_bytes=int((2.6 + 0.02 * second) * GIB), memory_total_bytes=int(7.75 * GIB),
        memory_available_bytes=int((7.75 - 2.6 - 0.02 * second) * GIB), run=run if live else None,
    )  # fmt: skip
    missing = {} if gpus else {"nvml": LIBRARY_FAILURES[LIBRARY_NOT_FOUND].sentence}
    devices = [a_gpu(index, second) for index in range(gpus)]
    return Tick(t_ns=START_NS + second * S, host=host, devices=devices, missing=missing, sample_us=900)


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
    return replace(a_tick(second), devices=[gpu], missing={})


def a_thermal_ramp(home: Home, **options: Any) -> Path:
    """A run of 60 steps joined to the GPU of `a_ramp_tick`, with the events its supervisor would have written."""
    directory = with_start(a_run(home, steps=60, planned=80, **options), watch_uuids=["GPU-00000000"])
    write_lines(directory / "telemetry.jsonl", [a_ramp_tick(second) for second in range(38)])
    events = [
        Event(t_ns=START_NS + 8 * S, kind="state", state="running"),
        Event(t_ns=START_NS + RAMP.start * S, kind="throttle_on", device=0, detail="sw_thermal"),
        Event(t_ns=START_NS + RAMP.stop * S, kind="throttle_off", device=0, detail="sw_thermal"),
        Event(t_ns=START_NS + 36 * S, kind="throttle_on", device=0, detail="sw_power_cap"),
    ]
    write_lines(directory / "events.jsonl", events)
    if (directory / "result.json").exists():
        conditions = RunConditions(start_temperature_c=55, still_warming=True)
        with_end(directory, diagnosis=[HEAT, SMALL_BATCH], conditions=conditions)
    return directory


def with_start(directory: Path, **fields: Any) -> Path:
    """Change these fields of the run's `run.json`; return its directory."""
    return put(directory / "run.json", replace(read_run_file(directory), **fields))


def with_end(directory: Path, **fields: Any) -> Path:
    """Change these fields of the run's `result.json`; return its directory."""
    return put(directory / "result.json", replace(read_result(directory), **fields))


HEAT = Diagnosis(
    rule="thermal",
    line="GPU 0 is throttled by heat for 202 ms of each 493 ms step, at 88 °C, 3 degrees below slowdown",
    advice="more cooling, or a lower power limit",
    severity="warning",
    cost_fraction=0.16,
    figures={"thermal_percent": 41.0, "thermal_ms_per_step": 202.1, "temperature_c": 88, "clock_loss_percent": 16.2},
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
    put(path, *records)


def a_run(
    home: Home, run_id: str = "20261121-054455-tiny-llama-7f3a", *, state: str = "finished", steps: int = 30,
    planned: int = 50, step_ms: float = 480.0, gpus: int = 0, reason: str | None = None, preset: str = "tiny-llama",
    synthetic: bool = False, error: RunError | None = None, log: str = "tokenizing the standard library\nepoch 1\n",
    knobs: dict[str, Any] | None = None, with_result: bool = True, memory_limit: list[int] | None = None,
    role: str | None = None, predicted_bytes: int | None = None,
) -> Path:  # fmt: skip
    """A run directory in `home`; without a result and with its lock held by the test it is live."""
    home.create()
    directory = home.directory(run_id)
    directory.mkdir(mode=0o700)
    chosen = {**defaults(), "seq_len": 128, "lr": 1e-3, "steps": planned, "devices": 1, **(knobs or {})}
    batch = int(str(chosen["batch_size"]))
    run = RunFile(
        run_id=run_id, preset=preset, title="Llama, 4 layers of 192, on this Python's own sources",
        model={"family": "llama"}, overrides=list(knobs or {}),
        data={"kind": "random" if synthetic else "text", "objective": "causal-lm"}, knobs=chosen,
        device="cuda" if gpus else "cpu", device_uuids=[f"GPU-{index:08d}" for index in range(gpus)],
        memory_limit_bytes=memory_limit, role=role,
        predicted=None if predicted_bytes is None else Prediction(total_bytes=predicted_bytes), boot_id="",
        clock=ClockAnchor(monotonic_ns=START_NS, wall_ns=WALL_NS),
    )  # fmt: skip
    put(directory / "run.json", run)
    (directory / "alive.lock").touch(mode=0o600)
    all_steps = [a_step(number, step_ms=step_ms, batch=batch) for number in range(1, steps + 1)]
    write_lines(directory / "steps.jsonl", all_steps)
    lines: list[WorkerLine] = [
        StartedLine(t_ns=START_NS + S, rank=0, pid=1, start_ticks=1),
        PhaseLine(t_ns=START_NS + 2 * S, phase="data", detail="opening text data"),
        DataLine(t_ns=START_NS + 3 * S, synthetic=synthetic, source="text"),
        PhaseLine(t_ns=START_NS + 4 * S, phase="model", detail=""),
        ActualLine(t_ns=START_NS + 7 * S, wrapper="none", compute_dtype="float32", device=run.device, world_size=1),
        PhaseLine(t_ns=START_NS + 8 * S, phase="train", detail=""),
    ]
    if error is not None:
        died = {"rank": error.rank, "phase": error.phase, "type": error.type, "message": error.message}
        lines.append(worker_lines.ExceptionLine(t_ns=START_NS + 9 * S, step=steps + 1, is_oom=state == "oom", **died))
    write_lines(directory / "worker.jsonl", lines)
    seconds = 8 + int(steps * step_ms / 1000) + 1
    write_lines(directory / "telemetry.jsonl", [a_tick(second, gpus=gpus) for second in range(seconds)])
    write_lines(directory / "events.jsonl", [Event(t_ns=START_NS, kind="state", state="running")])
    (directory / "output.log").write_text(log)
    if with_result:
        result = a_result(run, all_steps, state, reason, synthetic, error)
        put(directory / "result.json", result)
    return directory


def a_result(
    run: RunFile, steps: list[Step], state: str, reason: str | None, synthetic: bool, error: RunError | None
) -> Result:
    """The result as the supervisor would sum it up."""
    counted = [step for step in steps if not step.warmup]
    middle = counted[len(counted) // 2] if counted else None
    rate = middle.samples / middle.step_ms * 1e3 if middle else None
    tokens = middle.tokens / middle.step_ms * 1e3 if middle else None
    step_ms, memory = StepTime(), MemoryFigures(predicted_bytes=run.predicted_bytes)
    if middle:
        phases = {name: getattr(middle, f"{name}_ms") for name in ("data", "forward", "backward", "optimizer", "other")}
        step_ms = StepTime(p50=middle.step_ms, p90=middle.step_ms * 1.04, p99=middle.step_ms * 1.05, **phases)
    if steps:
        peaks = {name: getattr(steps[-1], name) for name in ("peak_allocated_bytes", "peak_reserved_bytes")}
        memory = replace(memory, **peaks)
    return Result(
        run_id=run.run_id, role=run.role, diagnosed=True, state=state, preset=run.preset, synthetic_data=synthetic,
        reason=reason if reason is not None else f"{len(steps)} of {run.knobs['steps']} steps",
        started_wall_ns=WALL_NS, seconds=8 + len(steps) * 0.5, knobs=run.knobs, overrides=run.override_values(),
        actual=Actual(wrapper="none", world_size=1, device=run.device), step_ms=step_ms, memory=memory, error=error,
        steps=StepCount(measured=len(counted), warmup=len(steps) - len(counted)),
        loss=Losses(first=8.1, last=5.7) if steps else Losses(),
        throughput=Throughput(
            samples_per_s=Spread(median=rate, mad=rate and rate * 0.01),
            tokens_per_s=Spread(median=tokens, mad=tokens and tokens * 0.01),
        ),
        cpu=Cpu(allocator="glibc 2.36", thresholds="strict in warm-up", threads=2, wait_policy="default"),
    )  # fmt: skip


OOM_WORDS = (
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 6442450944 bytes. Error code 12"
    " (Cannot allocate memory)"
)


def an_oom_run(home: Home, run_id: str = "20261121-060102-tiny-llama-00aa") -> Path:
    """A run that did not fit, in its first step, explained without a trace."""
    directory = a_run(
        home, run_id, state="oom", steps=0, reason=OOM_WORDS,
        error=RunError(rank=0, phase="forward", type="RuntimeError", message=OOM_WORDS),
        knobs={"batch_size": 4096, "memory_limit": "1GiB"}, memory_limit=[GIB],
    )  # fmt: skip
    return explained(directory)


def explained(directory: Path) -> Path:
    """The run out of memory with the explanation that its records give without a trace."""
    records, result = read_records(directory), read_result(directory)
    assert records.run is not None
    assert result is not None
    explanation = explain_run(out_of_memory_of(records, records.run, result.reason, result.error), lambda spec: None)
    return with_end(directory, oom=explanation)


def own_supervisor() -> Event:
    """The record of a supervisor that is this very process: alive for as long as the test."""
    own = identify(os.getpid())
    return Event(t_ns=START_NS, kind="supervisor", pid=own.pid, start_ticks=own.start_ticks)


def now(state: str = "running", at: int = 1) -> Event:
    """The state of a run since a second."""
    return Event(t_ns=START_NS + at * S, kind="state", state=state)


def a_full_tick(second: int, gpus: int = 8) -> Tick:
    """Every GPU gives every reading; GPU 5 sits in a slot of half the width and had a memory error."""

    def gpu(index: int) -> DeviceReading:
        return a_gpu(
            index, second, t_ns=START_NS + second * S, memory_utilization_percent=40 + index,
            degrees_to_slowdown_c=(91 - 61 - index) if index != 3 else 3, gpu_max_temperature_c=88,
            memory_temperature_c=78 + index, memory_max_temperature_c=95, memory_clock_mhz=3201,
            memory_clock_max_mhz=3201, power_average_w=601.0, power_instant_w=655.0, energy_mj=600_000 * second,
            thermal_violation_ns=S * second if index == 3 else 0,
            power_violation_ns=S * second // 4 if index == 1 else 0, pcie_generation=5, pcie_generation_max=5,
            pcie_width=8 if index == 5 else 16, pcie_width_max=16, pcie_tx_bytes=second * GIB,
            pcie_rx_bytes=second * 512 * MIB, nvlink_tx_bytes=second * 100 * GIB, nvlink_rx_bytes=second * 90 * GIB,
            ecc_corrected_errors=0, ecc_uncorrected_errors=int(index == 5), remapped_rows_corrected=0,
            remapped_rows_uncorrected=int(index == 5), remapped_rows_pending=int(index == 5),
        )  # fmt: skip

    tick = a_tick(second, live=False)
    host = replace(
        tick.host, load_1m=3.2, memory_available_bytes=4 * GIB, swap_used_bytes=0, disk_read_bytes=second * 80 * MIB,
        disk_write_bytes=second * MIB, network_received_bytes=second * 2 * MIB, network_sent_bytes=second * MIB,
    )  # fmt: skip
    missing = {f"gpu{index}.fan_percent": "not supported" for index in range(gpus)}
    return replace(tick, devices=[gpu(index) for index in range(gpus)], host=host, missing=missing, sample_us=12_400)


def some_rows(gpus: int = 8) -> tuple[ProcessRow, ...]:
    def row(at: int) -> ProcessRow:
        owner, command = "root" if at == 2 else "anna", f"/usr/bin/python train_{at}.py --lr 3e-4"
        held = ((at, (60 - at) * GIB),) if at < min(gpus, 3) else ()
        identity, figures = Identity(4000 + at, 5), (12.5 * at, at * 900 * MIB, 3600 * at + 7)
        return ProcessRow(identity.pid, identity, owner, at != 2, command, *figures, held)

    return *map(row, range(5)), *([ProcessRow(99_999, devices=((6, 3 * GIB),))] if gpus else [])


SEARCH_ID = "20261121-070000-tiny-llama-5ea2"
RUN_ID = "20261121-070002-tiny-llama-b001"
CONFIRMATION_ID = "20261121-070044-tiny-llama-b002"


def a_probe(batch: int, *, outcome: str = "fits", at: int = 0, **changes: Any) -> Probe:
    """A probe of 118 MiB and 21.5 MiB a sample before the step, 190 MiB in it."""
    peak = int((118 + 21.5 * batch) * MIB)
    phase_peaks = {"forward_backward": peak, "optimizer": 190 * MIB}
    fields: dict[str, Any] = {
        "t_ns": START_NS + at * S, "batch_size": batch, "outcome": outcome, "run_id": RUN_ID,
        "seconds": 2.5 + batch / 8, "rank": 0, "phase": "forward_backward", "phase_peaks": phase_peaks,
        "peak_allocated_bytes": peak, "peak_reserved_bytes": peak, "samples_per_s": 17.0 - batch / 20,
        "step_ms": batch / (17.0 - batch / 20) * 1e3,
        "ranks": [RankPeaks(rank=0, phase_peaks=phase_peaks, limit_peak_bytes=peak + 2 * MIB)],
    }  # fmt: skip
    if outcome == "oom":
        fields |= {"phase": "backward", "samples_per_s": None, "step_ms": None, "phase_peaks": {}, "ranks": []}
    return Probe(**{**fields, **changes})


def asked(**changes: Any) -> BatchQuestion:
    """tiny-llama under 1 GiB."""
    spec = resolve("tiny-llama", ["memory_limit=1GiB"])
    # The plan writes down how many devices it takes.
    knobs = {**spec.knobs, "devices": 1}
    fields: dict[str, Any] = {
        "t_ns": START_NS, "search_id": SEARCH_ID, "key": "k", "preset": "tiny-llama", "model": spec.model,
        "data": spec.data, "knobs": knobs, "limits_bytes": [GIB], "limit_words": "memory_limit",
        "clock": ClockAnchor(monotonic_ns=START_NS, wall_ns=WALL_NS),
    }  # fmt: skip
    return BatchQuestion(**{**fields, **changes})


CONDUCTED = Conducted(t_ns=START_NS, pid=1, start_ticks=1, boot_id="")
SEARCHES = Path(__file__).parents[1] / "recorded_searches"
"""Journals of searches that are over, without their question."""


def answered() -> list[Any]:
    """An answered search: four probes, of which one ran out of memory, and the confirmation run."""
    return [asked(), *read_all(SEARCHES / "max-batch.jsonl", BatchLine)[0]]


def going_on() -> list[Any]:
    """Two probes made, the third under way."""
    return answered()[:9]


def nothing_fits() -> list[Any]:
    """Batch 1 is too large, and two changes would help."""
    question = asked(knobs={**asked().knobs, "memory_limit": "64MiB"}, limits_bytes=[64 * MIB])
    return [question, CONDUCTED, *read_all(SEARCHES / "nothing-fits.jsonl", BatchLine)[0]]


BEST_ID = "20261121-080000-tiny-llama-be57"
WARM_ID = "20261121-080001-tiny-llama-0001"
COLD_IDS = ["20261121-080100-tiny-llama-c001", "20261121-080110-tiny-llama-c002"]
BASELINE = 2
"""batch_size=8 precision=fp32 checkpointing=off."""
FASTEST = 6
"""batch_size=4 precision=bf16 checkpointing=off."""


def a_question(**changes: Any) -> BestQuestion:
    """tiny-llama under 1 GiB at its own global batch."""
    spec = resolve("tiny-llama", ["memory_limit=1GiB"])
    fields: dict[str, Any] = {
        **spec.record_fields(), "t_ns": START_NS, "search_id": BEST_ID, "key": "k",
        "vary": {"batch_size": [4, 8, 16], "precision": ["fp32", "bf16"], "checkpointing": ["off", "full"]},
        "global_batch": 16, "budget_s": 600.0, "limits_bytes": [GIB],
        "clock": ClockAnchor(monotonic_ns=START_NS, wall_ns=WALL_NS),
    }  # fmt: skip
    return BestQuestion(**{**fields, **changes})


def best_answered(**changes: Any) -> list[Any]:
    """A whole search with its answer: twelve settings, of which the largest batch in fp32 is too large."""
    *lines, end = read_all(SEARCHES / "best-fit.jsonl", BestLine)[0]
    return [a_question(), *lines, replace(end, answer=replace(end.answer, **changes))]


def best_going_on() -> list[Any]:
    """Four settings tried, one out of memory, the sixth under way."""
    return best_answered()[:16]


SPACE: Space = best_answered()[2]
SLOW_HOST = "other processes take 22 % of the CPU that trains"


def a_trial(number: int, rate: float, at: int, *, outcome: str = "measured", warm: bool = True, **more: Any) -> Trial:
    """A trial of eight steps at this rate, its memory as predicted and 3 % more."""
    step_ms = 16_000 / rate
    fields: dict[str, Any] = {
        "t_ns": START_NS + at * S, "candidate_number": number, "run_id": WARM_ID, "outcome": outcome, "warm": warm,
        "samples_per_step": 16, "step_ms": [step_ms * (1 + 0.01 * ((place * 3) % 5 - 2)) for place in range(8)],
        "peak_allocated_bytes": int((SPACE.candidates[number].predicted_bytes or 0) * 1.03),
        "seconds": 3.2 if warm else 7.5,
    }  # fmt: skip
    if outcome == "oom":
        fields |= {"step_ms": [], "peak_allocated_bytes": None, "reason": "ran out of memory in backward"}
    return Trial(**{**fields, **more})


def a_search(home: Home, lines: list[Any], search_id: str | None = None) -> Path:
    """Write a search's journal and return its directory; a process that holds `search.lock` there conducts it."""
    directory = home.path / "searches" / (search_id or (lines[0].search_id if lines else BEST_ID))
    directory.mkdir(parents=True)
    write_lines(directory / "journal.jsonl", lines)
    (directory / "search.lock").touch(mode=0o600)
    return directory


def is_batch(directory: Path) -> bool:
    return (directory / "journal.jsonl").read_bytes().startswith(b'{"kind":"asked"')


def seen(directory: Path) -> Any:
    """The search as the reader sees it."""
    return JournalFollower(directory, BatchSnapshot if is_batch(directory) else BestSoFar).poll()
