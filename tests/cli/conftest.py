"""One finished run that many tests look at, and the stand-in NVML library."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cli.command import Cli, Done

# The stand-in NVML library is built by what stands beside its own tests.
sys.path.append(str(Path(__file__).parents[1] / "nvml"))


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> tuple[Cli, Done]:
    """One real run on real text, and what `run --json` said."""
    folder = tmp_path_factory.mktemp("trained")
    cli = Cli(folder / "home", folder / "config", cache)
    settings = ["--set", "steps=12", "--set", "batch_size=4", "--set", "seq_len=64", "--set", "lr=3e-3"]
    done = cli("run", "tiny-llama", *settings, "--json")
    assert done.code == 0, done.err
    return cli, done


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the compiled stand-in library."""
    import shared_object

    return shared_object.build(tmp_path_factory.mktemp("nvml-of-cli"))
