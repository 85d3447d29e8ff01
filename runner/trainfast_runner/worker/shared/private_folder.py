"""Folders that only their user can enter, whatever the umask: compiled extensions lie in them."""

from __future__ import annotations

import os
from pathlib import Path


def make_private(folder: Path) -> None:
    """Make a folder and those above it that are missing, mode 0700. Raises OSError."""
    if not os.path.isdir(folder):
        if not os.path.isdir(folder.parent):
            make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
