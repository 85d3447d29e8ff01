"""`search max-batch`: what it refuses; and, among the long tests, real searches under real limits."""

import json
import math
import os
import signal

import pytest

from cli.command import Started, directory_of, live_runs, until
from trainfast_runner.records.home import JOURNAL_FILE, Home, is_conducted
from trainfast_runner.records.run_directory import read_result, read_run_file
from trainfast_runner.search.batch_journal import BatchSnapshot, Probe
from trainfast_runner.search.journal import Launched

SMALL = [
    *("--set", "data.kind=random", "--set", "model.hidden_size=64", "--set", "model.num_hidden_layers=1"),
    *("--set", "seq_len=128"),
]
"""About 7 MiB a sample, most of it logits, and steps of tenths of a second."""
TOLERANCE_SHARE, TOLERANCE_BYTES = 0.03, 48 << 20


@pytest.mark.long
@pytest.mark.ci
def test_malloc_settings_of_ones_own_are_refused_on_the_cpu(cli):
    limited = ("search", "max-batch", "tiny-llama", "--set", "memory_limit=2GiB")
    line = cli(*limited, MALLOC_ARENA_MAX="2").refused()
    assert "MALLOC_ARENA_MAX" in line
    assert "env -u MALLOC_ARENA_MAX" in line
    assert Home(cli.home).run_ids() == []


def limited(limit, *more):
    return ["tiny-llama", *SMALL, "--set", f"memory_limit={limit}", *more]


def next_size_that_decides(found):
    """The smallest size that needs max(3 %, 48 MiB) more than the maximum."""
    fixed, per_sample = found["model"]["fixed_bytes"], found["model"]["bytes_per_sample"]
    need = fixed + per_sample * found["max_batch"]
    return int(found["max_batch"] + math.ceil(max(TOLERANCE_SHARE * need, TOLERANCE_BYTES) / per_sample))


@pytest.mark.long
def test_the_maximum_is_exact_on_both_sides(cli):
    done = cli("search", "max-batch", *limited("512MiB"), "--proof-steps", "3", "--json")
    assert done.code == 0, done.err
    found = done.json
    assert found["state"] == "answered"
    tried = [probe["outcome"] for probe in found["probes"]]
    assert len(tried) <= 6
    assert tried.count("oom") <= 1
    assert read_result(Home(cli.home).directory(found["proof_run_id"])).state == "finished"  # type: ignore[union-attr]
    assert 0 <= found["headroom_bytes"] < 48 << 20
    assert found["recommended_batch"] <= found["max_batch"]
    assert found["fastest"] is None, "speeds measured with memory in every step do not rank"
    for size, state in ((found["max_batch"], "finished"), (next_size_that_decides(found), "oom")):
        run = cli("run", *limited("512MiB", "--set", f"batch_size={size}", "--set", "steps=4"), "--json")
        assert run.json["state"] == state, f"batch {size}"
    shown = [row["run_id"] for row in cli("runs", "list", "--json").json["runs"]]
    assert found["proof_run_id"] in shown
    probes = {probe["run_id"] for probe in found["probes"]}
    assert not probes & set(shown)
    assert probes <= {row["run_id"] for row in cli("runs", "list", "--probes", "--json").json["runs"]}
    for probe in found["probes"]:
        shown = cli("runs", "show", probe["run_id"], "--json").json
        assert probe["batch_size"] in shown["tried"]
        if probe["outcome"] == "oom":
            assert shown["tried"][-1] == shown["oom"]["batch_size"] == probe["batch_size"]
            assert shown["oom"]["changes"] == []


@pytest.mark.long
def test_the_tightest_of_two_ranks_decides(cli):
    done = cli(
        *("search", "max-batch", *limited("512MiB+384MiB", "--set", "strategy=ddp", "--set", "devices=2")),
        *("--proof-steps", "2", "--no-oom", "--json"),
    )
    assert done.code == 0, done.err
    found = done.json
    assert (found["tightest_rank"], found["limit_bytes"]) == (1, 384 << 20)
    assert all(probe["outcome"] == "fits" for probe in found["probes"])
    assert 0 <= found["headroom_bytes"] < 48 << 20
    assert "rank 1" in done.err


@pytest.mark.long
def test_a_search_killed_in_each_of_its_phases_leaves_nothing_and_is_continued(cli):
    command = ("search", "max-batch", *limited("512MiB"), "--proof-steps", "2", "--json")
    before = []
    for text in ("starting", " fits: peak", "confirm "):
        started = Started(cli, command)
        started.until_printed(text)
        started.signal(signal.SIGKILL)
        started.end()
        directory = directory_of(cli)
        assert not is_conducted(directory)
        with (directory / JOURNAL_FILE).open("ab") as journal:
            journal.write(b'{"kind":"probe","batch_')
        if text != "confirm ":
            # The warm process sees for itself that nobody asks any more; a confirmation goes on until it is ended.
            until(lambda: not live_runs(cli), "the warm process to end")
        tried = [line.batch_size for line in BatchSnapshot.read(directory).lines if isinstance(line, Probe)]
        assert tried[: len(before)] == before
        before = tried
    done = cli(*command)
    assert done.code == 0, done.err
    assert directory_of(cli) == directory
    tried = [probe["batch_size"] for probe in done.json["probes"]]
    assert tried[: len(before)] == before
    assert len(tried) == len(set(tried)), "a finished probe was repeated"
    assert live_runs(cli) == []


@pytest.mark.long
def test_a_rank_killed_in_a_probe_ends_the_search_with_a_verdict(cli):
    ranks = ("--set", "strategy=ddp", "--set", "devices=2")
    started = Started(cli, ("search", "max-batch", *limited("512MiB", *ranks), "--json"))
    started.until_printed("probe ")
    (run,) = live_runs(cli)
    pid = next(json.loads(line)["pid"] for line in (run / "worker.rank1.jsonl").open())
    os.kill(pid, signal.SIGKILL)
    done = started.end()
    assert done.code == 4, done.err
    found = done.json
    assert found["state"] == "failed"
    assert "rank 1" in found["reason"]
    assert live_runs(cli) == []


@pytest.mark.long
def test_ctrl_c_cancels_and_keeps_the_journal(cli):
    # A confirmation that does not end by itself: however slow the other command is, there is something left to cancel.
    endless = ("--proof-steps", "100000")
    started = Started(cli, ("search", "max-batch", *limited("512MiB"), *endless, "--json"))
    started.until_printed("probing", "probe ")
    directory = directory_of(cli)
    # Another one may not conduct the same search beside it.
    other = cli("search", "max-batch", *limited("512MiB"), *endless)
    assert other.code == 2
    assert "another process" in other.err
    started.signal(signal.SIGINT)
    done = started.end()
    assert (done.code, done.json["state"]) == (130, "cancelled")
    assert live_runs(cli) == []
    for line in BatchSnapshot.read(directory).lines:
        if isinstance(line, Launched):
            run = read_run_file(Home(cli.home).directory(line.run_id))
            assert (run.search_id, run.role) == (directory.name, line.role)


@pytest.mark.long
def test_a_batch_of_one_that_does_not_fit_says_by_how_much(cli):
    settings = ["tiny-llama", "--set", "data.kind=random", "--set", "seq_len=1024", "--set", "memory_limit=100MiB"]
    done = cli("search", "max-batch", *settings, "--set", "model.max_position_embeddings=1024", "--json")
    assert done.code == 3, done.err
    found = done.json
    assert found["state"] == "nothing_fits"
    assert found["max_batch"] is None
    assert found["missing_bytes"] > 0
    assert found["changes"]
    # What is called enough is enough; what was not traced in time claims nothing.
    enough = [change for change in found["changes"] if change["predicted_bytes"] and not change["missing_bytes"]]
    for change in enough[:1]:
        turned = [word for knob, value in change["settings"].items() for word in ("--set", f"{knob}={value}")]
        run = cli("run", *settings, "--set", "batch_size=1", "--set", "steps=4", *turned, "--json")
        assert run.json["state"] == "finished", change
