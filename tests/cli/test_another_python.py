"""Training in somebody's own environment, which has torch and transformers and nothing of ours."""

import subprocess
from pathlib import Path

import pytest

from cli.command import SMALL, Cli

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("another-python")]


@pytest.mark.ci
def test_one_process_trains_there(cli, other_python):
    bare = subprocess.run([other_python, "-c", "import trainfast_runner"], capture_output=True, text=True)
    assert "ModuleNotFoundError" in bare.stderr
    assert_trained(cli, other_python, "steps=6")


def test_two_ranks_train_there(cli, other_python):
    assert_trained(cli, other_python, "strategy=ddp", "devices=2", "workers=1", "steps=6")


def assert_trained(cli: Cli, python: Path, *settings: str) -> None:
    """Train six steps with that Python; the run says so."""
    words = [word for setting in settings for word in ("--set", setting)]
    done = cli("run", "tiny-llama", *SMALL, *words, "--python", str(python), "--json")
    assert done.code == 0, done.err
    assert done.json["state"] == "finished"
    assert done.json["steps"] == {"measured": 3, "warmup": 3}
    assert str(python) in (cli.home / "runs" / done.json["run_id"] / "run.json").read_text()
