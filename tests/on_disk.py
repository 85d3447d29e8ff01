"""Ended runs and begun searches as they lie on disk, so that what reads them is tested without training."""

import time
from pathlib import Path
from typing import Any

import msgspec

from trainfast_runner.machine.processes import boot_id
from trainfast_runner.records import result as measured
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_file import ClockAnchor, RunFile
from trainfast_runner.records.run_lines import Actual, Step
from trainfast_runner.results.doubts import with_doubts
from trainfast_runner.search.batch_journal import BatchQuestion
from trainfast_runner.settings.knobs import defaults

STARTED_NS = 1_795_000_000_000_000_000
CLOCK = ClockAnchor(monotonic_ns=0, wall_ns=0)
A, B, C, D, E = (f"2026110{day}-100000-tiny-llama-{letter * 4}" for day, letter in enumerate("abcde", 1))
"""Ids of runs of five days, the newest last."""
SEARCH = "20261121-070000-tiny-llama-5ea2"
RECORDED = Path(__file__).with_name("recorded_runs") / "20261121-133323-tiny-llama-d703"
"""24 steps on a CPU beside a GPU that is held back by heat twice, as an earlier version recorded them."""


def put(file: Path, *records: object) -> Path:
    """Write records as the lines of a file in a folder that is made for it; return the folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    return file.parent


def run_file(run_id: str = "r1", **fields: Any) -> RunFile:
    """What is known of a run of tiny-llama when it starts."""
    return RunFile(**{"run_id": run_id, "preset": "tiny-llama", "clock": CLOCK, **fields})


def started(home: Path, run_id: str = A, **fields: Any) -> Path:
    """Write a run that has begun; return its directory."""
    return put(home / "runs" / run_id / "run.json", run_file(run_id, **fields))


def search(home: Path, *lines: object, search_id: str = SEARCH) -> Path:
    """Write the journal of a search; return its directory."""
    return put(home / "searches" / search_id / "journal.jsonl", *lines)


def batch_question(search_id: str = SEARCH, key: str = "k", **fields: Any) -> BatchQuestion:
    """The first line of a batch search's journal."""
    return BatchQuestion(**{"search_id": search_id, "key": key, "preset": "tiny-llama", "clock": CLOCK, **fields})


def result(run_id: str = A, *, samples_per_s: float = 100, mad: float = 1, steps: int = 40, **fields: Any) -> Result:
    """A finished run of tiny-llama with a batch of 8; `knobs` are laid over the defaults."""
    knobs = {**defaults(), **fields.pop("knobs", {})}
    step_ms = 8e3 / samples_per_s
    given: dict[str, Any] = {
        "state": "finished",
        "preset": "tiny-llama",
        "started_wall_ns": STARTED_NS,
        "seconds": 12.5,
        "synthetic_data": False,
        "steps": measured.StepCount(measured=steps, warmup=3),
        "throughput": measured.Throughput(
            samples_per_s=measured.Spread(median=samples_per_s, mad=mad),
            tokens_per_s=measured.Spread(median=samples_per_s * 128, mad=mad * 128),
        ),
        "step_ms": measured.StepTime(p50=step_ms, p90=step_ms, p99=step_ms, forward=step_ms / 3, backward=step_ms / 2),
        "memory": measured.MemoryFigures(peak_allocated_bytes=200 << 20, peak_reserved_bytes=200 << 20),
        "actual": Actual(device="cpu", world_size=1),
        "conditions": measured.RunConditions(),
        "cpu": measured.Cpu(thresholds="strict in warm-up"),
        **fields,
    }
    return Result(run_id=run_id, knobs=knobs, **given)


def ended(home: Path, run_id: str = A, **fields: Any) -> Path:
    """Write an ended run; return its directory."""
    directory = put(home / "runs" / run_id / "result.json", with_doubts(result(run_id, **fields)))
    (directory / "alive.lock").touch()
    return directory


def lost(home: Path, run_id: str = A, steps: int = 7) -> Path:
    """Write a run whose machine went down: records without an end, the last line cut short."""
    clock = ClockAnchor(monotonic_ns=time.monotonic_ns(), wall_ns=STARTED_NS)
    directory = started(home, run_id, knobs=dict(defaults()), boot_id=boot_id(), clock=clock)
    (directory / "alive.lock").touch()
    lines = [
        Step(t_ns=clock.monotonic_ns + n, step=n, warmup=n <= 3, samples=8, tokens=1024, step_ms=80.0)
        for n in range(1, steps + 1)
    ]
    put(directory / "steps.jsonl", *lines)
    with (directory / "steps.jsonl").open("ab") as file:
        file.write(b'{"t_ns": 12')
    return directory
