"""Training in somebody's own environment, which has torch and transformers and nothing of ours."""

import subprocess

import pytest

from cli.command import SMALL

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("another-python")]


@pytest.mark.parametrize(
    "settings", [pytest.param(["steps=6"], marks=pytest.mark.ci), ["strategy=ddp", "devices=2", "workers=1", "steps=6"]]
)
def test_one_process_and_two_ranks_train_there(cli, other_python, settings):
    bare = subprocess.run([other_python, "-c", "import trainfast_runner"], capture_output=True, text=True)
    assert "ModuleNotFoundError" in bare.stderr
    words = [word for setting in settings for word in ("--set", setting)]
    done = cli("run", "tiny-llama", *SMALL, *words, "--python", str(other_python), "--json")
    assert done.code == 0, done.err
    assert (done.json["state"], done.json["steps"]) == ("finished", {"measured": 3, "warmup": 3})
    assert str(other_python) in (cli.home / "runs" / done.json["run_id"] / "run.json").read_text()
