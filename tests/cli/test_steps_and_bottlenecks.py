"""`runs show --steps` and `--why`: what the GPUs did in each step, and what that says about the run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from cli.command import Cli
from cli.history import result
from trainfast_runner.records.run_file import ClockAnchor, RunFile
from trainfast_runner.records.run_records import read_records
from trainfast_runner.results.summary import summarise
from trainfast_runner.results.verdict import Verdict

S = 1_000_000_000
RUN = "20261101-100000-tiny-llama-aaaa"


def write_hot_run(home: Path) -> None:
    """Ten steps of a second on a CPU that watch GPU 2, throttled by heat from second 5 on, at half its clock."""
    directory = home / "runs" / RUN
    directory.mkdir(parents=True)
    run = RunFile(
        run_id=RUN,
        preset="tiny-llama",
        knobs={"workers": 0},
        watch_uuids=["GPU-b"],
        clock=ClockAnchor(monotonic_ns=0, wall_ns=1),
    )
    (directory / "run.json").write_bytes(msgspec.json.encode(run))
    steps = [
        {"t_ns": n * S, "step": n, "warmup": n < 3, "samples": 8, "tokens": 80, "step_ms": 1000, "data_ms": 5}
        for n in range(1, 11)
    ]
    ticks = [
        {
            "t_ns": n * S,
            "devices": [
                {
                    "index": 2, "uuid": "GPU-b", "temperature_c": 90 + n // 4, "slowdown_temperature_c": 91,
                    "thermal_violation_ns": max(0, n - 5) * S, "energy_mj": n * 200_000,
                    "sm_clock_mhz": 990 if n >= 5 else 1980, "sm_clock_max_mhz": 1980,
                }
            ],
        }
        for n in range(12)
    ]  # fmt: skip
    for name, lines in (("steps", steps), ("telemetry", ticks)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = summarise(directory, read_records(directory), Verdict("finished", ""), 12 * S)
    (directory / "result.json").write_bytes(msgspec.json.encode(summary))


def test_each_step_has_its_throttled_milliseconds(cli: Cli) -> None:
    write_hot_run(cli.home)
    steps = cli("runs", "show", "last", "--steps", "--json").json["steps"]
    assert [step["step"] for step in steps] == list(range(1, 11))
    assert [round(step["throttled_ms"]["thermal"]) for step in steps] == [0] * 5 + [1000] * 5
    assert steps[7]["throttled_ms"]["power"] is None
    assert steps[7]["sources"] == {"thermal": "policy counter"}
    assert (steps[7]["energy_joules"], steps[7]["joules_per_sample"]) == (pytest.approx(200), pytest.approx(25))
    assert steps[7]["clock_loss_fraction"] == pytest.approx(0.5)
    assert steps[7]["temperature_c"] == 91
    assert steps[7]["data_ms"] == 5
    header, *rows, source = cli("runs", "show", "last", "--steps").out.splitlines()
    assert re.split("  +", header.strip()) == [
        *("STEP", "TOOK", "DATA", "HEAT", "CLOCK LOSS", "ENERGY", "A SAMPLE", "TEMP AT START")
    ]
    assert rows[7].split()[:8] == ["8", "1,000", "ms", "5.00", "ms", "1,000", "ms", "50.0"]
    assert rows[7].endswith("91 °C")
    assert source == "throttled time from: policy counter"


def test_a_verdict_opens_to_its_numbers(cli: Cli) -> None:
    write_hot_run(cli.home)
    (finding,) = cli("runs", "show", "last", "--json").json["diagnosis"]
    assert (finding["rule"], finding["device"]) == ("thermal", 2)
    assert finding["evidence"]["thermal_ms_per_step"] == pytest.approx(625)
    assert (finding["cost_ms_per_step"], finding["cost_fraction"]) == (None, None), "the run does not use that GPU"
    shown = cli("runs", "show", "last").out
    assert (
        "bottleneck: watched GPU 2 is throttled by heat for 625 of each 1,000 ms step, at 92 °C, 1 °C over the" in shown
    )
    assert "  try: cooling" in shown
    assert "the run was throttled by heat on GPU 2 for 62.5 % of the measured time (policy counter)" in shown
    assert "; ? heat" in shown
    opened = cli("runs", "show", "last", "--why").out
    assert re.search(r"throttled by heat +62\.5 % +the rule: at least 2\.0 %", opened)
    assert "92 °C" in opened
    assert "source    chosen: two runs" in opened


def test_without_a_watched_gpu_the_steps_are_still_shown(cli: Cli) -> None:
    write_hot_run(cli.home)
    path = cli.home / "runs" / RUN / "run.json"
    path.write_bytes(path.read_bytes().replace(b'"watch_uuids":["GPU-b"]', b'"watch_uuids":[]'))
    step = cli("runs", "show", "last", "--steps", "--json").json["steps"][0]
    assert (step["step_ms"], step["energy_joules"]) == (1000, None)
    assert cli("runs", "show", "last", "--steps").out.splitlines()[0].split() == ["STEP", "TOOK", "DATA"]


def test_a_result_that_was_not_diagnosed_says_so(cli: Cli) -> None:
    old = json.loads(msgspec.json.encode(result(RUN)))
    del old["diagnosis"]
    directory = cli.home / "runs" / RUN
    directory.mkdir(parents=True)
    (directory / "result.json").write_text(json.dumps(old))
    assert "bottlenecks were not looked for" in cli("runs", "show", "last", "--why").out
