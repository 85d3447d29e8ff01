"""Records of a run by hand, and the result that is made of them."""

from on_disk import put
from trainfast_runner.records.run_directory import read_records
from trainfast_runner.records.run_file import ClockAnchor, RunFile
from trainfast_runner.results.summary import summarise
from trainfast_runner.results.verdict import Verdict

S = 1_000_000_000


def record(directory, **lines):
    """Write the lines of `steps`, `telemetry`, `events` or `worker` that are given."""
    for stem, records in lines.items():
        put(directory / f"{stem}.jsonl", *records)


def result_of(directory, **run):
    """The result of the records there, of a run with these fields."""
    fields = {"run_id": "r", "preset": "p", "clock": ClockAnchor(monotonic_ns=0, wall_ns=7), **run}
    put(directory / "run.json", RunFile(**fields))
    return summarise(directory, read_records(directory), Verdict("finished", ""), 60 * S)


def step(number, ms, **fields):
    """A step that ended at second `number`."""
    return {"t_ns": number * S, "step": number, "samples": 8, "tokens": 80, "step_ms": ms, **fields}


def steps(count=10, ms=1000, warmup=0):
    """Equal steps one after the other, the first of them in the warm-up."""
    return [step(n, ms, warmup=n <= warmup) for n in range(1, count + 1)]
