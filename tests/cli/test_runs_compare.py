"""`runs compare`: the difference of two runs, and what makes it doubtful."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

import pytest

from cli.command import SMALL, Cli
from cli.history import result, write
from trainfast_runner.records.home import Home
from trainfast_runner.records.result import STRICT_SPEED, Spread, Throughput
from trainfast_runner.records.result_conditions import RunConditions, Throttle
from trainfast_runner.records.run_file import ForeignProcess
from trainfast_runner.records.run_lines import Actual
from trainfast_runner.running.history import iter_rows
from trainfast_tui.widgets.tables.runs_table import RunsTable


def test_compare_tells_a_difference_from_noise(cli: Cli) -> None:
    write(cli.home, result("20261101-100000-tiny-llama-aaaa", samples_per_s=100.0, mad=1.0))
    write(cli.home, result("20261102-100000-tiny-llama-bbbb", samples_per_s=101.0, mad=1.0))
    write(cli.home, result("20261103-100000-tiny-llama-cccc", samples_per_s=130.0, mad=1.0, knobs={"batch_size": 16}))
    write(cli.home, result("20261104-100000-tiny-llama-dddd", samples_per_s=130.0, mad=60.0))
    write(cli.home, result("20261105-100000-tiny-llama-eeee", samples_per_s=130.0, mad=1.0, steps=3))
    verdicts = {}
    for other in ("20261102", "20261103", "20261104", "20261105"):
        found = cli("runs", "compare", "20261101", other, "--json").json
        rows = {row["label"]: row for row in found["rows"]}
        verdicts[other] = (rows["throughput"]["verdict"], rows["step"]["verdict"])
    same = ("no significant difference", "no significant difference")
    assert verdicts == {
        "20261102": same,
        "20261103": ("better", "not comparable: different batch"),
        "20261104": same,
        "20261105": ("doubtful", "doubtful"),
    }
    found = cli("runs", "compare", "20261101", "20261103", "--json").json
    assert found["knobs"] == [["batch_size", 8, 16]]
    throughput = found["rows"][0]
    assert (throughput["unit"], throughput["delta"], throughput["percent"]) == ("samples/s", 30.0, 30.0)
    text = cli("runs", "compare", "20261101", "20261103").out
    assert "batch_size  8  16" in text
    assert "+30.0 samples/s" in text
    assert "+30.0 %" in text
    assert "step: forward" in text


def test_compare_says_what_makes_it_doubtful(cli: Cli) -> None:
    write(cli.home, result("20261101-100000-tiny-llama-aaaa", synthetic_data=True))
    dirty = RunConditions(clean=False, foreign_processes=[ForeignProcess(pid=1)])
    write(cli.home, result("20261102-100000-tiny-llama-bbbb", state="oom", reason="no memory", conditions=dirty))
    assert "A and B are one and the same run." in cli("runs", "compare", "20261101", "20261101").out
    text = cli("runs", "compare", "20261101", "last").out
    assert "one and the same run" not in text
    assert "the same settings" in text
    for words in (
        "synthetic data",
        "ended out of memory: no memory",
        "started before the device had freed the last run's memory, or lost the device later",
        "shared its watched GPU with 1 other process",
    ):
        assert words in text


QUIET, BUSY = "20261101-100000-tiny-llama-aaaa", "20261102-100000-tiny-llama-bbbb"
SHARED = RunConditions(foreign_processes=[ForeignProcess(pid=1)])
UNDER_STRICT = Throughput(samples_per_s=Spread(median=13.7, mad=0.1), measured_under=STRICT_SPEED)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("other_processes", {"conditions": RunConditions(others_cpu_percent=76)}),
        ("heat", {"actual": Actual(device="cuda"), "throttle": Throttle(thermal_fraction=0.3)}),
        ("power_brake", {"actual": Actual(device="cuda"), "throttle": Throttle(brake_fraction=0.3)}),
        (
            "shared_gpu",
            {"actual": Actual(device="cuda"), "conditions": RunConditions(foreign_processes=[ForeignProcess()])},
        ),
        ("warming_up", {"conditions": RunConditions(still_warming=True)}),
        ("few_steps", {"steps": 4}),
        ("strict_malloc", {"throughput": UNDER_STRICT}),
    ],
)
def test_a_doubt_is_one_verdict_in_compare_history_and_json(cli: Cli, kind: str, fields: dict[str, Any]) -> None:
    write(cli.home, result(QUIET, samples_per_s=30.8, mad=0.1, actual=fields.get("actual", Actual(device="cpu"))))
    write(cli.home, result(BUSY, **{"samples_per_s": 13.7, "mad": 0.1, **fields}))
    for pair in ((QUIET, BUSY), (BUSY, QUIET), (BUSY, BUSY)):
        found = cli("runs", "compare", *pair, "--json").json
        assert kind in [doubt["kind"] for doubt in found["doubts"]]
        verdicts = {row["label"]: row["verdict"] for row in found["rows"]}
        expected = "not comparable: strict malloc thresholds" if kind == "strict_malloc" else "doubtful"
        assert (verdicts["throughput"], verdicts["step"]) == (expected, expected)
        assert verdicts["peak allocated"] == "no significant difference", "memory is as measured"
    [shown] = cli("runs", "show", BUSY, "--json").json["doubts"]
    listed = {row["run_id"]: row["doubts"] for row in cli("runs", "list", "--json").json["runs"]}
    assert (shown["kind"], listed) == (kind, {QUIET: [], BUSY: [shown]})
    assert shown["text"] in cli("runs", "show", BUSY).out
    assert f"? {shown['text']}" in cli("runs", "compare", QUIET, BUSY).out.replace("? B ", "? ")
    busy, quiet = iter_rows(Home(cli.home))
    assert ("? 13.7", "warning") in [(text.strip(), tone) for text, tone in RunsTable().row_line(busy, 120)]
    assert "?" not in "".join(text for text, _ in RunsTable().row_line(quiet, 120))


def test_the_power_limit_and_a_watched_gpu_leave_no_doubt(cli: Cli) -> None:
    """A GPU at its power limit is in its ordinary state, and a hot GPU beside a run on the CPU does not slow it."""
    at_limit = {"actual": Actual(device="cuda"), "throttle": Throttle(power_fraction=0.9)}
    write(cli.home, result(QUIET, **at_limit))
    write(cli.home, result(BUSY, samples_per_s=130.0, **at_limit))
    beside = result("20261103-100000-tiny-llama-cccc", throttle=Throttle(thermal_fraction=0.9))
    write(cli.home, beside)
    assert cli("runs", "compare", QUIET, BUSY, "--json").json["rows"][0]["verdict"] == "better"
    assert cli("runs", "show", beside.run_id, "--json").json["doubts"] == []


def test_a_short_run_beside_a_busy_loop_is_doubtful(cli: Cli) -> None:
    """The steps take less than a second: none of the host's samples falls into them."""
    with ExitStack() as stack:
        for _ in range(os.cpu_count() or 1):
            loop = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(loop.kill)
        ran = cli("run", "tiny-llama", *SMALL, "--set", "steps=12", "--json").json
    assert "other_processes" in [doubt["kind"] for doubt in ran["doubts"]]
    assert ran["doubts"] == cli("runs", "list", "--json").json["runs"][0]["doubts"]
