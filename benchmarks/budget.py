"""Budgets: measured figures beside the allowed ones, and the table of both."""

from collections.abc import Sequence

Row = tuple[str, str, str, bool]
"""Subject, measured, budget, True if it is held."""


def at_most(what: str, measured: float, most: float, unit: str, *, digits: int = 0, more: str = "") -> Row:
    """A figure that must not exceed `most`, both in `unit`; `more` stands behind the measured one."""
    return what, f"{measured:,.{digits}f} {unit}{more}", f"<= {most:,g} {unit}", measured <= most


def print_table(rows: Sequence[Row]) -> int:
    """Print the rows in columns; the exit status, 1 when a budget is not held."""
    widths = [max(map(len, column)) for column in zip(*(row[:3] for row in rows), strict=True)]
    for *texts, held in rows:
        cells = [str(text).ljust(width) for text, width in zip(texts, widths, strict=True)]
        print("  ".join([*cells, "held" if held else "NOT HELD"]))
    return 0 if all(held for *_, held in rows) else 1
