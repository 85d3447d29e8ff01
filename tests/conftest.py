"""Fixtures of all tests."""

import errno
import fcntl
import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import shared_object
from hypothesis import HealthCheck, settings

from cli.command import Cli

# How long an example takes, or its making, says more about the machine than about the code. The same examples every
# time: who looks for new ones says so, and a change is not refused for what was wrong before it.
profile = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("unhurried", derandomize=True, **profile)
settings.register_profile("searching", max_examples=3000, **profile)
settings.load_profile(os.environ.get("TRAINFAST_EXAMPLES", "unhurried"))

# What started the suite may have it ignore signals, as a shell does in the background and nohup always: every command
# that a test starts would inherit that. A handler is not inherited, and this one ignores them as before.
for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, lambda *_: None)


# Folders whose tests start trainings.
WITH_TRAININGS = {"cli", "end_to_end", "own_scripts", "worker"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put short tests last, so that the processes of a test run end together."""
    items.sort(key=lambda item: WITH_TRAININGS.isdisjoint(item.path.parts))


# Imports leave no garbage: looking for it takes a tenth of the time of collecting the tests.
gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()


# The trainings of a test run share its cores: their threads sleep while they wait, and no launch looks at the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> dict[str, int | None]:
    """`disk["room"]` is how many bytes it still takes; None is as many as there are."""
    state: dict[str, int | None] = {"room": None}
    real = os.write

    def write(fd: int, data: bytes) -> int:
        room = state["room"]
        if room is None:
            return real(fd, data)
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        state["room"] = max(0, room - len(data))
        return real(fd, data[:room])

    monkeypatch.setattr(os, "write", write)
    return state


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for all processes of a test run."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def cache(shared_folder: Path) -> Path:
    """An XDG cache for all processes of a test run: text is tokenized, and the training Python asked, once."""
    return shared_folder / "cache"


@pytest.fixture(scope="session")
def nvml_library(shared_folder: Path) -> Path:
    """The folder with the stand-in NVML library, compiled by the process of a test run that asks for it first."""
    folder = shared_folder / "nvml"
    folder.mkdir(exist_ok=True)
    with (shared_folder / "nvml.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not any(folder.iterdir()):
            shared_object.build(folder)
    return folder


@pytest.fixture
def cli(tmp_path: Path, cache: Path) -> Cli:
    """The command line with nothing in its history."""
    return Cli(tmp_path / "home", tmp_path / "config", cache)


@pytest.fixture(scope="session", autouse=True)
def temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Files left by processes, such as the log folders of torchrun, go when pytest deletes the test run's folder."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))
        yield
