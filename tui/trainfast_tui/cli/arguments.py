"""Arguments that several commands share, and the `type` functions of those that take numbers."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

MAX_WHOLE_NUMBER = 10**9
"""The largest whole number that an option takes; records hold 64 bits."""


def whole(text: str, minimum: int = 0) -> int:
    """Return a whole number from `minimum` on. Raises ArgumentTypeError."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None
    if value < minimum:
        raise argparse.ArgumentTypeError(f"must be a whole number from {minimum} on, not {text!r}")
    if value > MAX_WHOLE_NUMBER:
        raise argparse.ArgumentTypeError(f"must be at most {MAX_WHOLE_NUMBER}, not {text!r}")
    return value


def positive(text: str) -> int:
    """Return a whole number from 1 on. Raises ArgumentTypeError."""
    return whole(text, minimum=1)


def finite(text: str) -> float:
    """Return a number that is neither infinite nor NaN. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}")
    return value


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the argument RUN, which `directory_of` reads."""
    parser.add_argument("reference", metavar="RUN", help="an id, a unique prefix of one, its number, or last")


def directory_of(arguments: argparse.Namespace) -> Path:
    """Return the directory of RUN; raises UserError unless it names one run."""
    # The commands without a run use this file too, and need no records.
    from trainfast_runner.records.home import Home

    home = Home()
    return home.directory(home.find(arguments.reference))


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add `--set`, the same for every command with a preset."""
    words = "change a knob, model.FIELD or data.FIELD; may be given again"
    add_repeated(parser, "--set", "KNOB=VALUE", words, dest="settings")


def add_repeated(
    parser: argparse.ArgumentParser, option: str, metavar: str, help: str, dest: str | None = None
) -> None:
    """Add an option that may be given again: a list of its values."""
    parser.add_argument(option, action="append", default=[], metavar=metavar, dest=dest, help=help)


def add_wait(parser: argparse.ArgumentParser) -> None:
    """Add `--wait`."""
    parser.add_argument("--wait", action="store_true", help="wait while another run or search uses the device")


def add_python(parser: argparse.ArgumentParser) -> None:
    """Add `--python`."""
    parser.add_argument("--python", metavar="PATH", help="train with this Python, whatever torch it has")
