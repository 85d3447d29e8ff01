"""The arguments that every search on the command line takes."""

from __future__ import annotations

import argparse

from trainfast_tui.cli.number_types import finite
from trainfast_tui.cli.run import add_settings


def add_search_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the preset and the options of every search."""
    parser.add_argument("preset", metavar="PRESET", help="a name, NAME/VARIANT, or a path ending in .toml")
    add_settings(parser)
    parser.add_argument(
        "--fresh", action="store_true", help="begin anew, without an unfinished search or anything of earlier ones"
    )
    parser.add_argument("--wait", action="store_true", help="wait while another run uses the device")
    parser.add_argument("--cool-to", type=finite, metavar="C", help="start each process when the GPUs are below C °C")
    parser.add_argument("--python", metavar="PATH", help="train with this Python, whatever torch it has")
    parser.add_argument("--json", action="store_true", help="print the answer as one JSON object, the last line")
