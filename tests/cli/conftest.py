"""One finished run that many tests look at, in a Python without ours; and the stand-in NVML library."""

from __future__ import annotations

import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from cli.command import Cli, Done

# The stand-in NVML library is built by what stands beside its own tests.
sys.path.append(str(Path(__file__).parents[1] / "nvml"))


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


@pytest.fixture(scope="session")
def other_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that borrows this one's packages, ours and those only we need left out."""
    folder = tmp_path_factory.mktemp("other") / "env"
    venv.create(folder, with_pip=False, symlinks=True)
    packages = next(folder.glob("lib/python3*/site-packages"))
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not entry.name.startswith((*OURS, "_distutils", "distutils", "__pycache__")):
            (packages / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, cache: Path, other_python: Path) -> tuple[Cli, Done]:
    """One real run on a megabyte of real text, and what `run --json` said."""
    folder = tmp_path_factory.mktemp("trained")
    cli = Cli(folder / "home", folder / "config", cache)
    sources = Path(sysconfig.get_path("stdlib")) / "[a-d]*.py"
    settings = ["steps=12", "batch_size=4", "seq_len=64", "lr=3e-3", "data.kind=files", f"data.paths={sources}"]
    done = cli(
        "run",
        "tiny-llama",
        *(word for setting in settings for word in ("--set", setting)),
        "--python",
        str(other_python),
        "--json",
    )
    assert done.code == 0, done.err
    return cli, done


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the compiled stand-in library."""
    import shared_object

    return shared_object.build(tmp_path_factory.mktemp("nvml-of-cli"))
