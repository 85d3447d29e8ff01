"""The ASCII stand-in for every character the product prints, of the same width."""

from __future__ import annotations

import re

from rich.cells import cell_len

_RIGHT_DOTS = 0xB8
"""The right column of a braille cell (Unicode 16.0, chapter 21.1)."""
_BRAILLE = {chr(0x2800 + mask): "*" if mask & _RIGHT_DOTS else "o" for mask in range(1, 256)}
"""A solid line has dots in both columns, a dotted one in the left column alone."""
_LIKENESS = str.maketrans(
    _BRAILLE
    | {
        **dict(zip("–…°µ×²·≥≤“”\u00a0", '-~ ux2.><"" ', strict=True)),
        **dict(zip("▸•●○■✓✗↑↓←→Δ±≈", ">*@O#vx^v<>d+~", strict=True)),
        **dict(zip("█▓▒░▚╱╲┊", "#%+:&/\\!", strict=True)),
        **dict(zip("▏▎▍▌▋▊▉", "...####", strict=True)),
        **dict(zip("─━╌┄┈│┃┤├└╭╮╰╯", "-=--_||||+++++", strict=True)),
    }
)
_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")


def to_ascii(text: str) -> str:
    """Replace every sign outside ASCII by its likeness, or by `?` where it has none; the width stays the same."""
    if text.isascii():
        return text
    return _NOT_ASCII.sub(lambda match: "?" * cell_len(match[0]), text.translate(_LIKENESS))
