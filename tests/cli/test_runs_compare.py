"""`runs compare`: the difference of two runs, and what makes it doubtful."""

from __future__ import annotations

from cli.command import Cli
from cli.history import result, write
from trainfast_runner.records.result_conditions import RunConditions
from trainfast_runner.records.run_file import ForeignProcess


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
        "20261105": same,
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
