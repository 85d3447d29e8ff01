"""`knobs`: print every knob with its values, or the whole help of one."""

from __future__ import annotations

import argparse
from typing import Any

from msgspec.structs import asdict

from trainfast_runner.records.run_file import SCHEMA
from trainfast_runner.settings.knob_type import Knob
from trainfast_runner.settings.knobs import KNOBS, knob
from trainfast_tui.cli.printing.output import print_json, print_line, print_lines, print_table
from trainfast_tui.text.tables import pair_lines


def knobs_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("knob", metavar="NAME", nargs="?", help="one knob, with its whole help")
    parser.add_argument("--json", action="store_true", help="print {knobs[...]}")


def knobs(arguments: argparse.Namespace) -> int:
    """Print a table of all knobs, or the help of one."""
    entries = KNOBS if arguments.knob is None else (knob(arguments.knob),)
    if arguments.json:
        print_json({"schema": SCHEMA, "knobs": [_fields(entry) for entry in entries]})
    elif arguments.knob is None:
        rows = [(entry.name, entry.group, entry.text_of(entry.default), entry.values.describe()) for entry in entries]
        print_table(("KNOB", "GROUP", "DEFAULT", "TAKES"), rows)
    else:
        _print_help(entries[0])
    return 0


def _print_help(entry: Knob) -> None:
    print_line(f"{entry.name}: {entry.what}")
    rows = [("speed", entry.speed), ("memory", entry.memory), ("training", entry.training)]
    rows += [("takes", entry.values.describe()), ("default", entry.text_of(entry.default))]
    rows += [("only with", f"strategy {', '.join(entry.only_with)}")] if entry.only_with else []
    rows += [(tool.replace("_", "-"), name) for tool, name in asdict(entry.same_as).items()]
    print_lines(pair_lines((f"  {label}", text) for label, text in rows if text))


def _fields(entry: Knob) -> dict[str, Any]:
    return {
        "name": entry.name,
        "group": entry.group,
        "default": entry.default,
        "takes": entry.values.describe(),
        "what": entry.what,
        "speed": entry.speed,
        "memory": entry.memory,
        "training": entry.training,
        "only_with": entry.only_with,
        "same_as": entry.same_as,
    }
