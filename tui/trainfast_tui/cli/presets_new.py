"""`presets new`: the user's own preset, from another one and some settings; comments are kept."""

from __future__ import annotations

import argparse

from trainfast_runner.settings.saving import save_preset
from trainfast_runner.settings.spec import resolve
from trainfast_tui.cli.output import print_json, print_line
from trainfast_tui.cli.run import add_settings


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name", metavar="NAME", help="the name of the preset and of its file")
    parser.add_argument(
        "--from", default="tiny-llama", metavar="PRESET", dest="source", help="the preset to start from (tiny-llama)"
    )
    add_settings(parser)
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a preset of yours of that name, or hide a shipped one"
    )
    parser.add_argument("--json", action="store_true", help="print {name, path}")


def run(arguments: argparse.Namespace) -> int:
    """Write the file and print its path."""
    spec = resolve(arguments.source, arguments.settings)
    path = save_preset(arguments.name, spec, overwrite=arguments.overwrite, source=arguments.source)
    if arguments.json:
        print_json({"name": arguments.name, "path": str(path)})
    else:
        print_line(f"{path}\nrun it with: trainfast-tui run {arguments.name}")
    return 0
