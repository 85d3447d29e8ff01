"""`bench --vary` for real: a grid of tiny trainings."""

import json
import signal

import pytest

from cli.command import SMALL, until

pytestmark = pytest.mark.xdist_group("trainings-of-the-command-line")


TINY = ("bench", "tiny-llama", *SMALL, "--set", "steps=6", "--json")


@pytest.mark.long
def test_rows_that_differ_in_warm_knobs_share_a_process_and_a_refused_one_keeps_its_reason(cli, tmp_path):
    page = tmp_path / "table.html"
    grid = ("--vary", "batch_size=2,4", "--vary", "optimizer=adamw,sgd", "--vary", "strategy=single,dp")
    done = cli(*TINY, *grid, "--repeat", "2", "-o", str(page))
    assert done.code == 0, done.err
    rows = {row["id"]: row for row in done.json["rows"]}
    ran = {id: row for id, row in rows.items() if "strategy=single" in id}
    assert [(row["state"], row["warm"]) for row in ran.values()] == [("finished", True)] * 4
    refused = [row for id, row in rows.items() if id not in ran]
    assert [(row["state"], row["warm"], "GPU" in row["reason"]) for row in refused] == [("refused", None, True)] * 4
    assert done.json["baseline"] == "batch_size=2 optimizer=adamw strategy=single"
    # Both repetitions of all rows are one process.
    assert [run["state"] for run in cli("runs", "list", "--probes", "--json").json["runs"]] == ["finished"]
    for row in ran.values():
        result, knobs = row["result"], row["knobs"]
        assert len(row["samples_per_s"]) == 2
        assert (result["steps"]["measured"], result["steps"]["warmup"]) == (3, 3)
        assert {**result["knobs"], "devices": knobs["devices"]} == knobs
        assert result["actual"]["optimizer"] == {"adamw": "AdamW", "sgd": "SGD"}[knobs["optimizer"]]
        rate = 1000 * knobs["batch_size"] / result["step_ms"]["p50"]
        assert result["throughput"]["samples_per_s"]["median"] == pytest.approx(rate), "of three steps"
        assert result["memory"]["peak_allocated_bytes"] > 0
        assert result["flops"]["model_tflops_per_device"] > 0
        assert result["step_ms"]["forward"] is None
        assert result["step_ms"]["data"] >= 0, "without the wait for data nothing tells an idle GPU's cause"
    assert "<td>batch_size=4 optimizer=sgd strategy=single</td>" in page.read_text()
    assert "<td>warm</td>" in page.read_text()


@pytest.mark.long
def test_cold_rows_are_runs_of_their_own(cli):
    done = cli(*TINY, "--vary", "batch_size=2,4", "--cold")
    assert done.code == 0, done.err
    rows = done.json["rows"]
    assert [(row["state"], row["warm"]) for row in rows] == [("finished", False)] * 2
    assert len({row["result"]["run_id"] for row in rows}) == 2
    one, two = (row["samples_per_s"][0] for row in rows)
    assert rows[1]["vs_baseline_percent"] == pytest.approx(100 * (two / one - 1))


@pytest.mark.long
def test_a_row_that_ends_the_process_leaves_the_next_row_a_new_one(cli):
    started = cli.start(*TINY, "--vary", "batch_size=2,4", "--vary", "grad_accum=1,2", "--set", "steps=300")
    started.until_printed("2/4")
    run = cli("runs", "list", "--probes", "--json").json["runs"][0]["run_id"]
    cli("stop", run, "--now")
    done = started.end()
    rows = json.loads(done.out.splitlines()[-1])["rows"]
    states = [row["state"] for row in rows]
    assert states.count("finished") == 3, done.err
    assert set(states) == {"finished", "killed"}


@pytest.mark.long
def test_ctrl_c_ends_a_warm_row_and_its_process(cli):
    started = cli.start(*TINY, "--vary", "batch_size=2,4", "--set", "steps=1000000")
    started.until_printed("1/2")
    until(lambda: cli("runs", "list", "--probes", "--json").json["runs"], "a run")
    started.signal(signal.SIGINT)
    done = started.end()
    assert done.code == 130, done.err
    rows = json.loads(done.out.splitlines()[-1])["rows"]
    assert [row["state"] for row in rows] == ["stopped", "not_run"]
    assert [run["state"] for run in cli("runs", "list", "--probes", "--json").json["runs"]] == ["stopped"]
