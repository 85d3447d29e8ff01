"""The cost of the app itself: start-up, first paint, CPU and bytes with a live run, in a pseudo-terminal.

    python -m benchmarks.app

Eight GPUs come from the tests' stand-in NVML library, found by the ordinary loader; the run is a real one on the CPU.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
from benchmarks import as_installed
from benchmarks.budget import Row, at_most, print_table
from benchmarks.live_run import live_run
from benchmarks.pty_meter import Measurement, measure
from benchmarks.sampler_cost import throttled_on_and_off

from trainfast_runner.records.home import Home
from trainfast_runner.records.result import MemoryFigures, Result, Spread, Throughput
from trainfast_runner.records.run_file import RunFile

HELP_MS = 150.0
FIRST_PAINT_MS = 400.0
CPU_PERCENT = 5.0
KB_PER_S = 20.0
FRAME_KB = 10.0
RSS_MIB = 90.0
HISTORY = 100
LISTED = 10_000
LIST_S = 1.0


def rows() -> list[Row]:
    """Every budget of the app: what, measured, budget, held."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        environment = {**os.environ, **_eight_gpus(Path(folder)), "TRAINFAST_HOME": str(home)}
        write_history(Home(home), HISTORY)
        measured = [_start_up(environment), *_with_history(environment)]
        measured += _with_a_live_run(environment, "live run, 8 GPUs, 160x48")
        throttled = Path(folder) / "throttled"
        throttled.mkdir()
        measured += _with_a_live_run(
            {**throttled_on_and_off(throttled), "TRAINFAST_HOME": str(throttled / "home")},
            "live run, 8 GPUs throttled on and off every 3 s, 160x48",
            # Long enough that the charts are full of it.
            settle_s=100,
        )
        many = Path(folder) / "many"
        write_history(Home(many), LISTED)
        measured.append(_listing({**environment, "TRAINFAST_HOME": str(many)}))
    return measured


def write_history(home: Home, count: int) -> None:
    """`count` finished runs, as small as a real one's records of its end."""
    home.create()
    for number in range(count):
        run_id = f"20260101-{number:06d}-tiny-llama-{number % 65536:04x}"
        result = Result(
            run_id=run_id,
            state="finished",
            preset="tiny-llama",
            started_wall_ns=1_767_225_600_000_000_000 + number * 10**9,
            seconds=12.0,
            knobs={"batch_size": 8, "seq_len": 128, "precision": "fp32", "strategy": "single"},
            throughput=Throughput(samples_per_s=Spread(median=100.0 + number, mad=1.0)),
            memory=MemoryFigures(peak_allocated_bytes=300 << 20),
        )
        directory = home.directory(run_id)
        directory.mkdir()
        (directory / "result.json").write_bytes(msgspec.json.encode(result))
    if count:
        last = json.loads((directory / "result.json").read_bytes())
        run = msgspec.convert(
            {
                "run_id": run_id,
                "preset": "tiny-llama",
                "knobs": last["knobs"],
                "clock": {"monotonic_ns": 0, "wall_ns": 0},
            },
            RunFile,
        )
        (directory / "run.json").write_bytes(msgspec.json.encode(run))


def _eight_gpus(folder: Path) -> dict[str, str]:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "nvml"))
    import shared_object

    variables: dict[str, str] = shared_object.environment(shared_object.build(folder), gpus=8)
    return variables


def _start_up(environment: Mapping[str, str]) -> Row:
    """`--help` as a whole process beside a bare interpreter, in turn."""

    def seconds(command: list[str]) -> float:
        began = time.perf_counter()
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        return time.perf_counter() - began

    pairs = [(seconds([*as_installed.app(), "--help"]), seconds([sys.executable, "-c", ""])) for _ in range(15)]
    ours, bare = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
    return at_most("--help", ours, HELP_MS, "ms", more=f" (bare Python {bare:.0f} ms)")


def _with_history(environment: Mapping[str, str]) -> list[Row]:
    paints = [
        measure([*as_installed.app()], seconds=1, settle=1, env=dict(environment)).first_paint_ms or float("inf")
        for _ in range(5)
    ]
    what = f"first paint with {HISTORY} runs, median of {len(paints)}"
    return [at_most(what, statistics.median(paints), FIRST_PAINT_MS, "ms")]


def _with_a_live_run(environment: Mapping[str, str], where: str, settle_s: float = 6) -> list[Row]:
    """The app beside a training that keeps both its own core and the machine busy."""
    command = [*as_installed.app()]
    with live_run(command, environment, ("steps=1000000", "watch=0"), steps=1):
        seen: Measurement = measure(command, columns=160, rows=48, seconds=20, settle=settle_s, env=dict(environment))
    return [
        at_most(f"CPU, {where}", seen.cpu_percent, CPU_PERCENT, "%", digits=1, more=" of a core"),
        at_most(f"to the terminal, {where}", seen.bytes_per_s / 1e3, KB_PER_S, "kB/s", digits=1),
        at_most(f"largest frame, {where}", seen.largest_frame_bytes / 1e3, FRAME_KB, "kB", digits=1),
        at_most(f"RSS, {where}", seen.rss_mib or float("inf"), RSS_MIB, "MiB"),
    ]


def _listing(environment: Mapping[str, str]) -> Row:
    began = time.perf_counter()
    subprocess.run([*as_installed.app(), "runs", "list"], env=environment, stdout=subprocess.DEVNULL, check=True)
    seconds = time.perf_counter() - began
    return at_most(f"runs list, {LISTED:,} runs", seconds, LIST_S, "s", digits=2)


def main() -> int:
    """The command line: 1 when a budget is not held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    return print_table(rows())


if __name__ == "__main__":
    sys.exit(main())
