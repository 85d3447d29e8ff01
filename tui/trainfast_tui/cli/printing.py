"""Printing of commands: aligned tables for people, one JSON object as the last line for programs.

Every text passes `plain` here, whichever file it came from: no command prints a control sequence but its own bar.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import msgspec

from trainfast_runner.errors import UserError, nearest
from trainfast_runner.units import escaped
from trainfast_runner.worker.shared.host import can_move_cursor
from trainfast_tui.cli.exit_codes import EXIT_FAILED
from trainfast_tui.text import format as fmt
from trainfast_tui.text.format import MAX_COLUMN_CELLS

BAR_CELLS = 20
USUAL_COLUMNS = 80
"""Columns of a terminal of unknown size, which reports 0."""


def print_json(value: Any) -> None:
    """Print one line of JSON; takes dicts, lists, Structs and dataclasses."""
    try:
        line = msgspec.json.encode(value).decode()
        line.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        # A stdout or a file name that is not UTF-8: json escapes what msgspec leaves or refuses.
        import json

        line = json.dumps(msgspec.to_builtins(value))
    print(escaped(line))


def print_line(*lines: str) -> None:
    """Print each text as one line on stdout, in ASCII if its encoding cannot hold the text; without any an empty line.

    A line end within a text becomes a space.
    """
    for line in lines or ("",):
        print(_encodable(fmt.plain(line), sys.stdout.encoding))


def print_exact(text: str) -> None:
    """Print the text of a file, in UTF-8 whatever the encoding of stdout; on a terminal as `print_line` does."""
    if sys.stdout.isatty():
        print_lines(text.removesuffix("\n").split("\n"))
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))


def print_notice(text: str) -> None:
    """Print a line on stderr; while a progress bar is shown, use `Progress.print_line`."""
    write_to_stderr(text, end="\n")


def write_to_stderr(text: str, *, begin: str = "", end: str = "") -> None:
    """Write one line on stderr, in ASCII if its encoding cannot hold the text; `begin` and `end` as they are."""
    with suppress(OSError):  # the terminal has gone; the command goes on, and its exit code still counts
        sys.stderr.write(f"{begin}{_encodable(fmt.plain(text), sys.stderr.encoding)}{end}")
        sys.stderr.flush()


def _encodable(text: str, encoding: str | None) -> str:
    """Return the text, or its ASCII likeness if `encoding` cannot hold it."""
    try:
        text.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return fmt.to_ascii(text.replace(" °C", " C"))
    return text


def print_lines(lines: Iterable[str]) -> None:
    """Print each line."""
    for line in lines:
        print_line(line)


def can_redraw(stream: TextIO) -> bool:
    """True if the stream is a terminal that can write over its text."""
    return stream.isatty() and can_move_cursor(os.environ)


def terminal_width(stream: TextIO | None = None) -> int | None:
    """Return COLUMNS, else the columns of the terminal on the stream (stdout); None if that is not a terminal."""
    stream = stream or sys.stdout
    if not stream.isatty():
        return None
    columns = os.environ.get("COLUMNS", "")
    try:
        width = int(columns) if columns.isdecimal() else 0
        return width or os.get_terminal_size(stream.fileno()).columns or USUAL_COLUMNS
    except OSError:  # the terminal has gone
        return USUAL_COLUMNS


def progress_bar(fraction: float) -> str:
    """Return a bar filled to a fraction from 0 to 1."""
    full = round(max(0.0, min(1.0, fraction)) * BAR_CELLS)
    return "█" * full + "░" * (BAR_CELLS - full)


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]], drop: Sequence[str] = ()) -> None:
    """Print a table, its lines cut to the width of a terminal and whole in a pipe.

    The columns named in `drop` are left out one by one until the rest fits the terminal, so that no figure is cut.
    """
    # Not Rich's table: 10,000 rows of it take 20 s.
    cells = [[fmt.plain(cell, MAX_COLUMN_CELLS) for cell in row] for row in rows]
    print_lines(fmt.table(header, cells, width=terminal_width(), drop=drop))


def output_path(name: str, endings: Sequence[str]) -> Path:
    """Return the path of `-o NAME`. Raises UserError for another ending, and for a file that cannot be written."""
    path = Path(name).absolute()
    if path.suffix.lower() not in endings:
        close = nearest(path.suffix, endings) if path.suffix else None
        raise UserError(f"{name}: unknown file type", key="-o", allowed=endings, nearest=close)
    refuse_unwritable(path, "-o")
    return path


def refuse_unwritable(path: Path, option: str) -> None:
    """Raise UserError, before any work, if the file that `option` names cannot be written."""
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent}", key=option)
    if path.is_dir():
        raise UserError(f"{path} is a folder", key=option)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"{path} cannot be written", key=option)


def write_output(path: Path, text: str, option: str = "-o") -> int:
    """Write the file that `option` names, and return its bytes. Raises UserError."""
    try:
        return path.write_bytes(text.encode())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}", key=option, exit_code=EXIT_FAILED) from None
    except UnicodeEncodeError as error:
        word = os.fsencode(error.object[error.start : error.end])
        raise UserError(f"cannot write {path}: {word!r} is not UTF-8", key=option) from None
