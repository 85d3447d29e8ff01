"""One finished run that many tests look at, runs without an end, and a Python without our packages."""

import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.command import SMALL, Cli, Done

OURS = ("trainfast", "_editable_impl_trainfast")
OF_US_ALONE = ("textual", "msgspec", "psutil", "pynvml", "nvidia_ml", "rich", "tomlkit")


@pytest.fixture(scope="session")
def other_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that borrows this one's packages, ours and those only we need left out."""
    folder = tmp_path_factory.mktemp("other") / "env"
    venv.create(folder, with_pip=False, symlinks=True)
    packages = next(folder.glob("lib/python3*/site-packages"))
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not entry.name.startswith((*OURS, *OF_US_ALONE, "_distutils", "distutils", "__pycache__")):
            (packages / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


@pytest.fixture
def gpus(nvml_library: Path, tmp_path: Path) -> Callable[..., dict[str, str]]:
    """`gpus(count, *lines)` is the environment of a machine whose GPUs do what these lines of a scenario say."""

    def with_gpus(count: int, *lines: str) -> dict[str, str]:
        (tmp_path / "scenario").write_text("".join(f"{line}\n" for line in lines))
        scenario = {"NVML_STAND_IN_SCENARIO": str(tmp_path / "scenario")}
        return {"LD_LIBRARY_PATH": str(nvml_library), "NVML_STAND_IN_GPUS": str(count), **scenario}

    return with_gpus


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> tuple[Cli, Done]:
    """One real run on a megabyte of real text, and what `run --json` said."""
    folder = tmp_path_factory.mktemp("trained")
    cli = Cli(folder / "home", folder / "config", cache)
    sources = Path(sysconfig.get_path("stdlib")) / "[a-d]*.py"
    settings = ["steps=12", "batch_size=4", "lr=3e-2", "data.kind=files", f"data.paths={sources}"]
    words = (word for setting in settings for word in ("--set", setting))
    done = cli("run", "tiny-llama", *SMALL, *words, "--json")
    assert done.code == 0, done.err
    return cli, done


@pytest.fixture(params=["script", pytest.param("preset", marks=[pytest.mark.ci, pytest.mark.long])])
def endless(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """The last words of a `run` that does not end by itself: of a script that imports no torch, or of a preset."""
    if request.param == "preset":
        return ["tiny-llama", *SMALL, "--set", "steps=1000000"]
    script = tmp_path / "steps.py"
    script.write_text("import time, trainfast_door\nwhile True:\n    trainfast_door.step()\n    time.sleep(0.005)\n")
    return ["--steps=1000000", "--samples-per-step=2", "--", sys.executable, str(script)]
