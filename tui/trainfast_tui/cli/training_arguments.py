"""Arguments that several commands with a preset share."""

from __future__ import annotations

import argparse


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add `--set`, the same for every command with a preset."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KNOB=VALUE",
        dest="settings",
        help="change a knob, model.FIELD or data.FIELD; may be given again",
    )


def add_wait(parser: argparse.ArgumentParser) -> None:
    """Add `--wait`."""
    parser.add_argument("--wait", action="store_true", help="wait while another run uses the device")


def add_python(parser: argparse.ArgumentParser) -> None:
    """Add `--python`."""
    parser.add_argument("--python", metavar="PATH", help="train with this Python, whatever torch it has")
