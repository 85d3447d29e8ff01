"""`search best` with real trainings: the answer, what a kill leaves behind, strategies on two processes."""

import random
import signal

import pytest

from cli.command import Started, directory_of, live_runs, until
from trainfast_runner.records.home import is_conducted
from trainfast_runner.search.best_journal import BestJournal, ColdRun, Trial
from trainfast_runner.search.effects import Measurements

SMALL = [
    *("--set", "data.kind=random", "--set", "model.hidden_size=64", "--set", "model.num_hidden_layers=2"),
    *("--set", "seq_len=32"),
]
GRID = [
    *("--vary", "batch_size=2,4,8,16", "--vary", "grad_accum=1,2,4,8", "--vary", "precision=fp32,bf16"),
    *("--vary", "optimizer=adamw,adamw-fused,sgd", "--global-batch", "16"),
]
VERDICTS = {"measured", "beaten", "bound", "too_large", "incompatible", "failed", "not_tried"}


def until_measured(cli, started, count):
    """Wait until the journal of the only search has so many measurements that count, or the command has ended."""

    def measured():
        found = list((cli.home / "searches").glob("*"))
        lines = BestJournal.read(found[0]).lines if found else []
        return sum(isinstance(one, Trial | ColdRun) and one.outcome == "measured" for one in lines)

    until(lambda: measured() >= count or started.process.poll() is not None, f"{count} measurements")


def assert_is_whole(cli, found, candidates):
    """The answer has every field, a verdict for each candidate, and runs that can be opened."""
    assert found["state"] == "answered"
    assert found["candidates"] == candidates == len(found["verdicts"])
    assert {one["verdict"] for one in found["verdicts"]} <= VERDICTS
    assert all(one["reason"] for one in found["verdicts"])
    for side in ("best", "baseline"):
        assert len(found[side]["run_ids"]) >= 2
        assert len(set(found[side]["run_ids"])) == len(found[side]["run_ids"])
        for run_id in found[side]["run_ids"]:
            shown = cli("runs", "show", run_id, "--json").json
            assert shown["state"] == "finished"
            assert {name: shown["knobs"][name] for name in found[side]["knobs"]} == found[side]["knobs"]
            assert shown["throughput"]["measured_under"] is None
        rate = found[side]["samples_per_s"]
        assert rate["low"] <= rate["median"] <= rate["high"]
    gain = found["gain"]
    assert gain["low"] <= gain["percent"] <= gain["high"]


@pytest.mark.long
def test_every_candidate_gets_a_verdict_and_winner_and_baseline_two_cold_runs(cli):
    done = cli("search", "best", "tiny-llama", *SMALL, *GRID, "--budget", "2m", "--json")
    assert done.code == 0, done.err
    found = done.json
    assert_is_whole(cli, found, candidates=24)
    assert found["dropped"] == 72
    assert all(one["knobs"]["batch_size"] * one["knobs"]["grad_accum"] == 16 for one in found["verdicts"])
    measured = {tuple(one["knobs"].values()) for one in found["trials"]}
    assert 1 < len(measured) < 24, "as many settings measured as there are"
    assert {one["knob"] for one in found["effects"]} >= {"batch_size", "precision", "optimizer"}
    assert ("optimizer" in found["changes_training"]) == (found["best"]["knobs"]["optimizer"] == "sgd")
    lines = BestJournal.read(directory_of(cli)).lines
    assert all(len(one.losses) == len(one.step_ms) > 0 for one in lines if isinstance(one, Trial) and not one.reason)
    assert live_runs(cli) == []


@pytest.mark.long
def test_a_search_killed_five_times_measures_nothing_twice(cli):
    command = ("search", "best", "tiny-llama", *SMALL, *GRID, "--budget", "5m", "--json")
    moments = random.Random(7)
    count = 0
    for _ in range(5):
        started = Started(cli, command)
        count += moments.randrange(1, 3)
        until_measured(cli, started, count)
        assert started.process.poll() is None, f"it ended before it was killed five times:\n{started.err}"
        started.signal(signal.SIGKILL)
        started.end()
        assert not is_conducted(directory_of(cli))
    done = cli(*command)
    assert done.code == 0, done.err
    lines = BestJournal.read(directory_of(cli)).lines
    assert_is_whole(cli, done.json, candidates=24)
    trials = [one for one in Measurements(lines, can_repeat=True).trials if one.outcome == "measured"]
    firsts = [one.candidate_number for one in trials if not one.repeats]
    assert len(firsts) == len(set(firsts)), "a setting was measured twice"
    cold_runs = [one.run_id for one in lines if isinstance(one, ColdRun)]
    assert len(cold_runs) == len(set(cold_runs)), "a run was recorded twice"
    assert live_runs(cli) == []


@pytest.mark.long
def test_ctrl_c_prints_the_best_so_far_and_the_same_command_goes_on(cli):
    command = ("search", "best", "tiny-llama", *SMALL, *GRID[2:], "--budget", "2m", "--json")
    started = Started(cli, command)
    until_measured(cli, started, 2)
    started.signal(signal.SIGINT)
    cancelled = started.end()
    assert cancelled.code == 130, cancelled.err
    assert cancelled.json["state"] == "cancelled"
    assert cancelled.json["best"]["samples_per_s"]["median"] > 0
    assert live_runs(cli) == []
    done = cli(*command)
    assert done.code == 0, done.err
    assert "continuing" in done.err
    assert done.json["search_id"] == cancelled.json["search_id"]


@pytest.mark.long
def test_nothing_that_fits_ends_with_the_smallest_excess(cli):
    words = ("--set", "memory_limit=48MiB", "--set", "model.hidden_size=256", "--vary", "batch_size=32,64")
    done = cli("search", "best", "tiny-llama", *SMALL, *words, "--budget", "2m", "--json")
    assert done.code == 3, done.err
    assert done.json["state"] == "nothing_fits"
    assert done.json["missing_bytes"] > 0


@pytest.mark.long
def test_a_device_in_use_is_refused_and_can_be_waited_for(cli):
    words = ("tiny-llama", *SMALL, "--vary", "precision=fp32,bf16", "--budget", "2m", "--json")
    other = cli("run", "tiny-llama", *SMALL, "--set", "steps=100000", "--detach").out.strip()
    refused = cli("search", "best", *words)
    assert refused.code == 2
    assert other in refused.err
    assert "--wait" in refused.err
    waiting = Started(cli, ("search", "best", *words, "--wait"))
    waiting.until_printed("waiting for")
    cli("stop", other)
    done = waiting.end()
    assert done.code == 0, done.err


@pytest.mark.long
def test_two_processes_pick_a_strategy_by_measurement(cli):
    words = ("--set", "devices=2", "--vary", "strategy=single,ddp,fsdp", "--global-batch", "8", "--budget", "3m")
    done = cli("search", "best", "tiny-llama", *SMALL, *words, "--json")
    assert done.code == 0, done.err
    found = done.json
    assert_is_whole(cli, found, candidates=3)
    assert {one["knobs"]["strategy"] for one in found["verdicts"]} == {"single", "ddp", "fsdp"}
    assert {one["value"] for one in found["effects"] if one["knob"] == "strategy"} == {"ddp", "fsdp"}
    assert all(one["verdict"] == "measured" for one in found["verdicts"]), found["verdicts"]
