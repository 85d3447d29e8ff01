"""`presets new`: the user's own preset, from another one and some settings or from a script's own flags."""

from __future__ import annotations

import argparse

from trainfast_runner.errors import UserError
from trainfast_runner.settings.presets import PLAIN_PRESET
from trainfast_runner.settings.saving import save_preset
from trainfast_runner.settings.spec import resolve
from trainfast_tui.cli.arguments import add_settings
from trainfast_tui.cli.printing.output import print_json, print_line


def presets_new_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Make a preset of your own from another one, its comments kept. With a command after -- of a script of your"
        " own: the script is run to its argument parser and no further (argparse, HfArgumentParser, click, Hydra), its"
        " flags are listed, and the preset maps knobs to them."
    )
    parser.add_argument(
        "name",
        metavar="NAME",
        help="name of the preset and of its file; add -- COMMAND to make it from a script's flags",
    )
    parser.add_argument("--from", metavar="PRESET", dest="source", help=f"the preset to start from ({PLAIN_PRESET})")
    add_settings(parser)
    parser.add_argument(
        "--map",
        action="append",
        default=[],
        metavar="KNOB=FLAG",
        dest="mapping",
        help="the flag of the script that takes a knob, such as 'batch_size=--bs'; empty for none; may be given again",
    )
    parser.add_argument("--python", metavar="PATH", help="run the script with this Python")
    parser.add_argument("--all", action="store_true", help="list every flag of the script, not only those of knobs")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a preset of yours of that name, or hide a shipped one"
    )
    parser.add_argument(
        "--json", action="store_true", help="print {name, path}; for a script also its flags and mapping"
    )


def presets_new(arguments: argparse.Namespace) -> int:
    """Write the file and print its path."""
    if arguments.script is not None:
        if arguments.source is not None:
            raise UserError("--from is for a preset without a command after --", key="--from")
        from trainfast_tui.cli import presets_new_script

        return presets_new_script.presets_new_of_script(arguments)
    for option, name in (("mapping", "--map"), ("python", "--python"), ("all", "--all")):
        if getattr(arguments, option):
            raise UserError(f"{name} is for a command after --", key=name)
    source = arguments.source or PLAIN_PRESET
    spec = resolve(source, arguments.settings)
    path = save_preset(arguments.name, spec, overwrite=arguments.overwrite, source=source)
    if arguments.json:
        print_json({"name": arguments.name, "path": str(path)})
    else:
        print_line(str(path), f"run it with: trainfast-tui run {arguments.name}")
    return 0
