"""Training in somebody's own environment, which has torch and transformers and nothing of ours."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cli.command import SMALL, Cli, Done

# One process of the test run shares the finished training among these tests.
pytestmark = pytest.mark.xdist_group("trainings-of-the-command-line")


def argv_of(cli: Cli, done: Done) -> str:
    return (cli.home / "runs" / done.json["run_id"] / "run.json").read_text()


def test_one_process_trains_there(trained: tuple[Cli, Done], other_python: Path) -> None:
    bare = subprocess.run([other_python, "-c", "import trainfast_runner"], capture_output=True, text=True)
    assert "ModuleNotFoundError" in bare.stderr
    cli, done = trained
    assert done.json["state"] == "finished"
    assert str(other_python) in argv_of(cli, done)


@pytest.mark.long
def test_two_ranks_train_there(cli: Cli, other_python: Path) -> None:
    settings = ["--set", "strategy=ddp", "--set", "devices=2", "--set", "workers=1", "--set", "steps=6"]
    done = cli("run", "tiny-llama", *SMALL, *settings, "--python", str(other_python), "--json")
    assert done.code == 0, done.err
    assert done.json["state"] == "finished"
    assert done.json["steps"] == {"measured": 3, "warmup": 3}
    assert str(other_python) in argv_of(cli, done)
