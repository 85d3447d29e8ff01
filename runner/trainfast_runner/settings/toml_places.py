"""The line of a key in a TOML text, for an error message."""

from __future__ import annotations

import re
from collections.abc import Sequence

HEADER = re.compile(r"^\s*\[\[?\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?$")
KEY = re.compile(r"^\s*(?:\"([^\"]+)\"|'([^']+)'|([A-Za-z0-9_.\-]+))\s*=")


def line_of(text: str, path: Sequence[str | int]) -> int | None:
    """The line (from 1) of `path` such as ("variants", 1, "knobs", "batch_size"); None when not found.

    Walks table headers and keys; a key inside an inline table is given the line where that table starts
    unless it stands on a line of its own.
    """
    wanted = [str(part) for part in path]
    best: tuple[int, int] | None = None
    table: list[str] = []
    counts: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        header = HEADER.match(line)
        if header:
            name = header[1].strip()
            table = [part.strip().strip("\"'") for part in name.split(".")]
            if line.lstrip().startswith("[["):
                counts[name] = counts.get(name, -1) + 1
                table.append(str(counts[name]))
            elif table and table[0] in counts:
                table = [table[0], str(counts[table[0]]), *table[1:]]
            here = table
        else:
            key = KEY.match(line)
            if not key:
                continue
            here = table + (key[3].split(".") if key[3] else [key[1] or key[2]])
        depth = _shared(here, wanted)
        if depth == len(here) and (best is None or depth > best[1]):
            best = (number, depth)
    return best[0] if best else None


def _shared(here: Sequence[str], wanted: Sequence[str]) -> int:
    count = 0
    for one, other in zip(here, wanted, strict=False):
        if one != other:
            break
        count += 1
    return count
