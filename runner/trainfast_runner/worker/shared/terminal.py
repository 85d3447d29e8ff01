"""The abilities of the terminal."""

from __future__ import annotations

from collections.abc import Mapping


def can_move_cursor(environment: Mapping[str, str]) -> bool:
    """True if TERM names a terminal whose cursor programs can move; one that terminfo does not know may well."""
    return environment.get("TERM", "") not in ("", "dumb", "unknown")
