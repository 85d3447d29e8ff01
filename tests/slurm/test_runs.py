"""Runs as jobs of a real Slurm with two nodes."""

import os
import subprocess

import pytest

from cli.command import SMALL, until
from trainfast_runner.records.home import Home
from trainfast_runner.running.present_state import run_state
from trainfast_runner.running.settling import recover_result
from trainfast_runner.running.slurm import job_of

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif("TRAINFAST_TEST_SLURM" not in os.environ, reason="make test-slurm starts the Slurm of these"),
]
TWO_NODES = ["run", "tiny-llama", *SMALL, "--set", "strategy=ddp", "--slurm=-N 2 --exclusive"]


def test_a_run_trains_on_two_nodes(cli):
    done = cli(*TWO_NODES, "--set", "steps=6", "--json")
    assert done.code == 0, done.err
    assert (done.json["state"], done.json["actual"]["nodes"], done.json["actual"]["world_size"]) == ("finished", 2, 2)


def test_scancel_from_outside_stops_the_run_with_slurms_reason(cli):
    directory = Home(cli.home).directory(cli(*TWO_NODES, "--set", "steps=100000", "--detach").out.split()[-1])
    until((directory / "steps.jsonl").exists, "a first step", 60)
    job = job_of(directory)
    assert job is not None
    subprocess.run(["scancel", job], check=True)
    result = until(lambda: recover_result(directory), "its result", 40)
    assert result.state == "stopped"
    assert result.reason.startswith("Slurm ended it: scancel")
    assert subprocess.run(["pgrep", "-f", str(directory)], capture_output=True).returncode == 1


def test_a_queued_run_waits_says_so_and_is_stopped(cli):
    first, second = (
        Home(cli.home).directory(cli(*TWO_NODES, "--set", "steps=100000", "--detach").out.split()[-1]) for _ in "ab"
    )
    until((first / "steps.jsonl").exists, "a first step", 60)
    waiting = run_state(second)
    assert waiting.state == "starting"
    assert (waiting.reason or "").startswith("queued by Slurm: ")
    assert cli("stop", second.name, "--json").json["state"] == "stopped"
    assert cli("stop", first.name, "--json").json["state"] == "stopped"


def test_a_partition_that_does_not_exist_is_refused(cli):
    assert "partition" in cli(*TWO_NODES[:-1], "--slurm=-N 2 -p nowhere").refused()
