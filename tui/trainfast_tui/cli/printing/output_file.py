"""The file of `-o`: its name is checked before any work, its text is written at the end."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from trainfast_runner.errors import UserError, nearest
from trainfast_tui.cli.exit_codes import EXIT_FAILED


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
