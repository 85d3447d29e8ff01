"""What the jobs of Slurm need no Slurm for: commands that are absent, hang or answer as told, and options."""

import os
from pathlib import Path

import pytest

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.running import slurm
from trainfast_runner.running.slurm import JobState, batch_script, cancel, end_reason, job_state, node_count, submit
from trainfast_tui.cli.parser import parse

SCRIPT = batch_script(1, ["true"], Path("/tmp/run"))


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """A folder before all others on PATH, without Slurm on the rest of it."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin")
    return tmp_path


def put(folder, name, lines):
    """Put a command of these lines of shell into the folder; it writes its arguments to the file `NAME.said` first."""
    path = folder / name
    path.write_text(f'#!/bin/sh\nprintf "%s " "$@" > {path}.said\n{lines}\n')
    path.chmod(0o755)


def test_commands_that_are_absent_are_named(commands, monkeypatch):
    monkeypatch.setenv("PATH", str(commands))
    with pytest.raises(UserError, match="sbatch is not on PATH: ") as refused:
        submit(SCRIPT, [])
    assert refused.value.exit_code == 2
    assert job_state("1") == JobState("unknown", reason="squeue is not on PATH: start this where Slurm's commands are")
    with pytest.raises(UserError, match="job 1 was not cancelled: scancel is not on PATH"):
        cancel("1")


def test_a_run_without_sbatch_is_refused_and_leaves_nothing(cli, commands):
    line = cli("run", "tiny-llama", "--set", "strategy=ddp", "--slurm=--nodes=2", PATH=str(commands)).refused()
    assert "sbatch is not on PATH" in line
    assert not Home(cli.home).run_ids()


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["--slurm", "--nodes=2 --partition=x"], "--nodes=2 --partition=x"),
        (["--slurm", "--nodes=2"], "--nodes=2"),
        (["--slurm=--nodes=2"], "--nodes=2"),
        (["--slurm", "-N2"], "-N2"),
        (["--slurm", "--detach"], ""),
        (["--slurm"], ""),
    ],
)
@pytest.mark.parametrize("preset_at", [0, -1])
def test_options_of_sbatch_follow_as_a_word_of_their_own(words, options, preset_at):
    words = ["run", "tiny-llama", *words] if preset_at == 0 else ["run", *words, "tiny-llama"]
    _, parsed = parse(words)
    assert (parsed.slurm, parsed.detach, parsed.preset) == (options, "--detach" in words, "tiny-llama")


def test_a_command_that_hangs_is_given_up(commands, monkeypatch):
    monkeypatch.setattr(slurm, "ANSWER_WITHIN_S", 0.2)
    monkeypatch.setattr(slurm, "SUBMIT_WITHIN_S", 0.2)
    for name in ("sbatch", "squeue", "scancel"):
        put(commands, name, "exec sleep 60")
    assert job_state("1").stage == "unknown"
    with pytest.raises(UserError, match="sbatch did not answer within"):
        submit(SCRIPT, [])
    with pytest.raises(UserError, match="scancel did not answer within"):
        cancel("1")


def test_a_job_of_another_cluster_is_asked_for_there(commands):
    put(commands, "sbatch", 'cat > /dev/null; echo "7;far"')
    put(commands, "squeue", 'echo "CLUSTER: far"; echo "RUNNING None"')
    put(commands, "scancel", "")
    job_id = submit(SCRIPT, ["-M", "far"])
    assert (job_id, job_state(job_id)) == ("7;far", JobState("running", "RUNNING"))
    cancel(job_id)
    assert (commands / "scancel.said").read_text() == "7 -M far "
    put(commands, "squeue", 'echo "CLUSTER: far"')
    assert job_state(job_id) == JobState("gone")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("PENDING Nodes required for job are DOWN", JobState("pending", "PENDING", "Nodes required for job are DOWN")),
        ("CONFIGURING None", JobState("pending", "CONFIGURING")),
        ("COMPLETING None", JobState("running", "COMPLETING")),
        ("SUSPENDED None", JobState("running", "SUSPENDED")),
        ("FAILED NonZeroExitCode", JobState("gone", "FAILED", "NonZeroExitCode")),
        ("NODE_FAIL None", JobState("gone", "NODE_FAIL")),
        ("", JobState("gone")),
    ],
)
def test_a_state_of_squeue_is_pending_running_or_gone(commands, said, expected):
    put(commands, "squeue", f"echo '{said}'")
    assert job_state("1") == expected
    assert end_reason(expected) == ("Slurm ended it: a node failed" if expected.state == "NODE_FAIL" else None)


@pytest.mark.parametrize("option", ["--array=1-3", "-a1-3", "-W", "--wait", "-n", "--ntasks=4", "--wrap=date"])
def test_an_option_under_which_it_is_not_one_job_is_refused(option):
    with pytest.raises(UserError, match=r"^--slurm: --[a-z]+ does not go with a run, which is one job$"):
        submit(SCRIPT, ["--partition=a", option])


@pytest.mark.parametrize(
    ("options", "nodes"),
    [([], 1), (["-N2"], 2), (["-N", "3"], 3), (["--nodes=4"], 4), (["--nodes", "5", "-p", "a"], 5), (["-pN2"], 1)],
)
def test_the_nodes_of_the_options_are_counted(options, nodes):
    assert node_count(options) == nodes


@pytest.mark.parametrize("options", [["-N1-4"], ["-N"], ["--nodes=two"], ["--nodes=0"], ["--nodes="]])
def test_nodes_that_are_not_one_number_are_refused(options):
    with pytest.raises(UserError, match=r"^--slurm: the number of nodes is '.*', not one whole number "):
        node_count(options)
