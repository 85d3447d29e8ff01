"""A command line with a home of its own for every test."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.command import Cli


@pytest.fixture
def cli(tmp_path: Path, cache: Path) -> Cli:
    """The command line with nothing in its history."""
    return Cli(tmp_path / "home", tmp_path / "config", cache)
