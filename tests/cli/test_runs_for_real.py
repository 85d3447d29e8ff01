"""`run`, `attach`, `logs`, `stop`: real trainings, real signals."""

import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from cli.command import COMMAND, PATIENCE_S, SMALL, until, until_measured
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_directory import is_alive, is_alive_after_grace
from trainfast_runner.running.present_state import run_state

# One process of the test run shares the finished training among these tests.
pytestmark = pytest.mark.xdist_group("trainings-of-the-command-line")

RUNNING = "/1,000,000"
"""In the progress of an endless run, behind the steps taken."""


def test_a_run_prints_its_progress_and_its_result_and_is_in_the_history(trained):
    cli, done = trained
    result = done.json
    assert done.out.count("\n") == 1
    assert result["state"] == "finished"
    assert result["synthetic_data"] is False
    assert result["steps"] == {"measured": 9, "warmup": 3}
    assert result["throughput"]["samples_per_s"]["median"] > 0
    assert result["loss"]["last"] < result["loss"]["first"]
    for phase in ("data", "forward", "backward", "optimizer", "other"):
        assert result["step_ms"][phase] >= 0
    assert result["memory"]["peak_allocated_bytes"] > 0
    assert result["actual"]["world_size"] == 1
    assert result["step_ms"]["data"] < 0.1 * result["step_ms"]["p50"], "text in memory is not waited for"
    # A phase that is over before it is looked at is not said; imports take seconds anywhere.
    assert "importing the training stack" in done.err
    assert " is starting\n" in done.err, "its id can be used from another terminal at once"
    assert "\nstarting\n" not in done.err, "a status is printed once"
    assert not {"\x1b", "\r"} & set(done.err)
    assert [row["run_id"] for row in cli("runs", "list", "--json").json["runs"]] == [result["run_id"]]
    assert "samples/s (median; MAD" in cli("runs", "show", "last").out
    assert cli("runs", "show", "last", "--json").json == result
    assert (cli("logs", "last", "--json").json["run_id"], cli("logs", "last", "-f").code) == (result["run_id"], 0)
    assert cli("attach", "last").code == 0


@pytest.mark.ci
@pytest.mark.long
def test_a_lever_tells_how_far_its_losses_are_from_the_plain_runs(cli):
    words = ["tiny-llama", *SMALL, "--set", "steps=6", "--json"]
    plain, chunked = cli("run", *words).json, cli("run", *words, "--set", "loss=chunked").json
    assert plain["loss_difference"] is None
    found = chunked["loss_difference"]
    assert (found["against"], found["steps"], found["tolerance"]) == (plain["run_id"], 5, 1e-5)
    assert found["greatest"] <= 1e-5
    assert "other_loss" not in [doubt["kind"] for doubt in chunked["doubts"]]
    assert f"differs from {plain['run_id']}'s by up to" in cli("runs", "show", "last").out


@pytest.mark.ci
@pytest.mark.long
def test_out_of_memory_is_a_result_with_advice(cli):
    # Of the changes that would make it fit, only the loss in chunks and checkpointing are left to trace.
    settings = ["steps=5", "memory_limit=300MiB", "batch_size=4096", "seq_len=64", "optimizer=sgd"]
    settings.append("precision=bf16-pure")
    words = ["tiny-llama", *SMALL, *(word for setting in settings for word in ("--set", setting))]
    # Traced here, where no time limit ends it.
    assert cli("predict", *words, "--set", "checkpointing=full").code in (0, 3)
    done = cli("run", *words)
    assert done.code == 3, done.err
    assert "  out of memory: " in done.out
    assert "to make it fit, cheapest first" in done.out
    assert "the prediction says that each fits:" in done.out or "those with a predicted peak fit by" in done.out
    assert "--set batch_size=" in done.out
    shown = cli("runs", "show", "last", "--json").json
    assert shown["state"] == "oom"
    assert "allocate" in shown["reason"]
    assert 0 < shown["oom"]["held_bytes"] < 300 << 20
    traced = [change["predicted_bytes"] for change in shown["oom"]["changes"] if change["predicted_bytes"] is not None]
    assert traced
    assert max(traced) <= 300 << 20


def test_a_second_ctrl_c_kills_at_once(cli, tmp_path):
    stubborn = tmp_path / "stubborn.py"
    stubborn.write_text(
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\n"
        "while True:\n    signal.pause()\n"
    )
    started = cli.start("run", "--json", "--", sys.executable, str(stubborn))
    until(lambda: any("deaf" in log.read_text() for log in cli.home.glob("runs/*/output.log")), "the script")
    started.signal(signal.SIGINT)
    started.until_printed("stopping the run")
    started.signal(signal.SIGINT)
    done = started.end()
    assert (done.code, done.json["state"]) == (4, "killed"), done.err
    assert done.json["reason"].startswith("killed as asked"), "not for the time that it took"


def test_a_detached_run_is_attached_to_and_stopped_and_the_next_one_outlives_its_watchers(cli, endless):
    detached = cli("run", "--detach", "--json", *endless)
    assert detached.code == 0, detached.err
    run_id = detached.json["run_id"]
    directory = Home(cli.home).directory(run_id)
    assert detached.json["run_dir"] == str(directory)
    assert detached.json["state"] in ("starting", "running")

    attached = cli.start("attach", "last")
    attached.until_printed(RUNNING)
    attached.signal(signal.SIGINT)
    assert attached.end().code == 130
    assert is_alive(directory)

    hung_up = cli.start("attach", run_id)
    hung_up.until_printed("running")
    hung_up.signal(signal.SIGHUP)
    assert hung_up.end().code == 129
    assert is_alive(directory)

    (row,) = cli("runs", "list", "--json").json["runs"]
    assert (row["state"], row["supervised"]) == ("running", True)
    so_far = cli("runs", "show", "last", "--json").json
    assert so_far["state"] == "running"
    assert so_far["step"] > 0
    assert "is still running; nothing was deleted" in cli("runs", "rm", "last").refused()
    assert f"in use by {run_id}" in cli("run", *endless).refused()

    waiting = cli.start("run", "--wait", *endless)
    waiting.until_printed(f"waiting for {run_id} to end")
    stopped = cli("stop", run_id, "--json")
    assert stopped.code == 0, stopped.err
    assert stopped.json["state"] == "stopped"
    assert not is_alive_after_grace(directory)
    assert cli("runs", "rm", run_id).code == 0

    waiting.until_printed(RUNNING)
    until_measured(cli)
    check_that_a_run_outlives_its_watchers(cli, waiting)


def check_that_a_run_outlives_its_watchers(cli, started):
    """Kill the command and the supervisor of the only run: the run goes on, and can be stopped."""
    started.signal(signal.SIGKILL)
    started.end()
    (row,) = cli("runs", "list", "--json").json["runs"]
    assert (row["state"], row["supervised"]) == ("running", True)

    directory = Home(cli.home).directory(row["run_id"])
    supervisor = run_state(directory).supervisor_pid
    assert supervisor is not None
    os.kill(supervisor, signal.SIGKILL)
    until(lambda: not run_state(directory).supervised, "the supervisor has ended")
    assert "unsupervised" in cli("runs", "list").out

    done = cli("stop", "last", "--json")
    assert done.code == 0, done.err
    assert "stopping its processes directly" in done.err
    assert done.json["state"] == "lost"
    assert done.json["throughput"]["samples_per_s"]["median"] > 0
    assert not is_alive_after_grace(directory)


@pytest.mark.long
def test_the_terminal_gets_a_bar_that_redraws_itself(cli):
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "run", "tiny-llama", *SMALL, "--set", "steps=400"],
        env={**cli.environment, "TERM": "xterm-256color"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=slave,
    )
    os.close(slave)
    painted = b""
    with suppress(OSError):  # the last writer has closed its side
        while piece := os.read(master, 65536):
            painted += piece
    out, _ = process.communicate(timeout=PATIENCE_S)
    os.close(master)
    text = painted.decode()
    assert process.returncode == 0, text
    assert "/400 " in text
    assert "█" in text
    assert text.count("\r") > 3
    assert text.endswith("\x1b[K")
    assert "synthetic data" in out.decode()


@pytest.mark.long
def test_a_run_that_waited_is_recorded_as_it_started(cli, gpus, tmp_path):
    """The GPU is hot when the run is planned and cool when it starts."""
    machine = gpus(1, "ramp 0 0 90 1 80 345")
    other = cli("run", "tiny-llama", *SMALL, "--set", "steps=1000000", "--detach", "--json").json["run_id"]
    wanted = ["--set", "steps=5", "--set", "watch=0", "--wait"]
    started = cli.start("run", "tiny-llama", *SMALL, *wanted, "--json", **machine)
    started.until_printed(f"waiting for {other} to end")
    cooled = tmp_path / "cooled"
    cooled.write_text("ramp 0 0 30 1 80 345\n")
    cooled.rename(tmp_path / "scenario")
    assert cli("stop", other).code == 0
    done = started.end()
    assert done.json["state"] == "finished"
    assert done.json["conditions"]["start_temperature_c"] < 60
