"""`import`: turn settings of another tool, or a shell command, into a preset."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trainfast_runner.errors import UserError
from trainfast_runner.export.imported import IMPORTED_KINDS, SHELL_COMMAND, import_settings
from trainfast_runner.settings.presets import PLAIN_PRESET
from trainfast_tui.cli.printing.output import print_json, print_line, print_notice
from trainfast_tui.cli.printing.output_file import output_path, write_output
from trainfast_tui.text.format import plain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "file",
        metavar="FILE",
        help="a TrainingArguments block, an accelerate YAML, a DeepSpeed json or a shell command; - is stdin",
    )
    parser.add_argument(
        "--from",
        default=PLAIN_PRESET,
        metavar="PRESET",
        dest="base",
        help=f"model, data and the rest ({PLAIN_PRESET})",
    )
    parser.add_argument("-o", metavar="PRESET.toml", dest="output", help="write the preset instead of printing it")
    parser.add_argument("--json", action="store_true", help="print {kind, knobs, not_understood, preset}")


def run(arguments: argparse.Namespace) -> int:
    """Print or write the preset; print the settings that were not understood on stderr."""
    output = None if arguments.output is None else output_path(arguments.output, (".toml",))
    name = "stdin" if arguments.file == "-" else arguments.file
    try:
        text = sys.stdin.read() if arguments.file == "-" else Path(arguments.file).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {name}: {error.strerror}", key="FILE") from None
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {name}: {error}", key="FILE") from None
    imported = import_settings(text, name, arguments.base)
    if output is not None:
        write_output(output, imported.preset + "\n")
    if arguments.json:
        print_json(imported)
        return 0
    for line in imported.not_understood:
        print_notice(plain(f"not understood: {line}"))
    if imported.kind in IMPORTED_KINDS:
        print_notice(f"model and data are those of {arguments.base}; --from PRESET takes others")
    if imported.kind == SHELL_COMMAND:
        print_notice("to run the script itself: trainfast-tui presets new NAME -- COMMAND")
    print_line(imported.preset if output is None else f"{output}\nrun it with: trainfast-tui run {output}")
    return 0
