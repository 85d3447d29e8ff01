"""A terminal of 120 columns and 40 rows."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from cli.command import Cli
from end_to_end.terminal import Terminal


@pytest.fixture
def terminal(tmp_path: Path, cli: Cli) -> Iterator[Terminal]:
    with closing(Terminal(tmp_path, 120, 40, cli.environment)) as opened:
        yield opened
