"""The arguments that every search on the command line takes."""

from __future__ import annotations

import argparse

from trainfast_tui.cli.number_types import finite
from trainfast_tui.cli.training_arguments import add_python, add_settings, add_wait


def add_search_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the preset and the options of every search."""
    parser.add_argument("preset", metavar="PRESET", help="a name, NAME/VARIANT, or a path ending in .toml")
    add_settings(parser)
    parser.add_argument(
        "--fresh", action="store_true", help="begin anew, without an unfinished search or anything of earlier ones"
    )
    add_wait(parser)
    parser.add_argument("--cool-to", type=finite, metavar="C", help="start each process when the GPUs are below C °C")
    add_python(parser)
    parser.add_argument("--json", action="store_true", help="print the answer as one JSON object, the last line")
