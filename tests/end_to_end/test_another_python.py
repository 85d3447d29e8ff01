"""Training in somebody's own environment, which has torch and transformers and nothing of ours."""

from __future__ import annotations

import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from cli.command import SMALL, Cli

OURS = (
    "trainfast",
    "_editable_impl_trainfast",
    "textual",
    "msgspec",
    "psutil",
    "pynvml",
    "nvidia_ml",
    "rich",
    "tomlkit",
)


@pytest.fixture(scope="module")
def other_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that borrows this one's packages, ours and those only we need left out."""
    folder = tmp_path_factory.mktemp("other") / "env"
    venv.create(folder, with_pip=False, symlinks=True)
    packages = next(folder.glob("lib/python3*/site-packages"))
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not entry.name.startswith((*OURS, "_distutils", "distutils", "__pycache__")):
            (packages / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


@pytest.mark.parametrize(
    "strategy", [["strategy=single"], pytest.param(["strategy=ddp", "devices=2", "workers=1"], marks=pytest.mark.long)]
)
def test_it_trains_there(cli: Cli, other_python: Path, strategy: list[str]) -> None:
    bare = subprocess.run([other_python, "-c", "import trainfast_runner"], capture_output=True, text=True)
    assert "ModuleNotFoundError" in bare.stderr
    settings = [word for setting in strategy for word in ("--set", setting)]
    done = cli("run", "tiny-llama", *SMALL, *settings, "--set", "steps=6", "--python", str(other_python), "--json")
    assert done.code == 0, done.err
    assert done.json["state"] == "finished"
    assert done.json["steps"] == {"measured": 3, "warmup": 3}
    argv = (cli.home / "runs" / done.json["run_id"] / "run.json").read_text()
    assert str(other_python) in argv
