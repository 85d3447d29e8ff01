"""The argument RUN of commands about one run."""

from __future__ import annotations

import argparse
from pathlib import Path

from trainfast_runner.records.home import Home


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the argument RUN."""
    parser.add_argument("reference", metavar="RUN", help="an id, a unique prefix of one, or last")


def directory_of(arguments: argparse.Namespace) -> Path:
    """Return the directory of RUN; raises UserError unless it names one run."""
    home = Home()
    return home.directory(home.find(arguments.reference))
