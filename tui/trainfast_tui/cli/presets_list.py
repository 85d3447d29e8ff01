"""`presets list`: list every preset by name; a broken one with its error."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from trainfast_runner.errors import UserError
from trainfast_runner.records.run_file import SCHEMA
from trainfast_runner.settings import presets
from trainfast_runner.settings.scripts import script_preset
from trainfast_tui.cli.printing.output import print_json, print_table
from trainfast_tui.text.tables import FigureHeading


def presets_list_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print {presets[...]}")


def presets_list(arguments: argparse.Namespace) -> int:
    """Print the presets by name."""
    rows = [_row(name, path) for name, path in sorted(presets.preset_files().items())]
    if arguments.json:
        print_json({"schema": SCHEMA, "presets": rows})
        return 0
    cells = [
        (
            row["name"],
            "shipped" if row["shipped"] else "yours",
            str(row["variants"] or ""),
            f"broken: {row['error']}" if row["error"] else row["title"],
        )
        for row in rows
    ]
    print_table(("PRESET", "FROM", FigureHeading("VARIANTS"), "TITLE"), cells)
    return 0


def _row(name: str, path: Path) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": name,
        "title": None,
        "shipped": path.parent == presets.shipped_directory(),
        "variants": 0,
        "path": str(path),
        "error": None,
    }
    try:
        if script_preset.path_of(name) is not None:
            return {**row, "title": script_preset.load(path).title or name}
        preset, _ = presets.load(name)
    except UserError as error:
        return {**row, "error": error.line()}
    return {**row, "title": preset.title, "variants": len(preset.variants)}
