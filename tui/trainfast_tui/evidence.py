"""The figures of a diagnosis as a person reads them: each carries its unit at the end of its name."""

from __future__ import annotations

from collections.abc import Callable

from trainfast_tui import format as fmt

UNITS: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("_fraction", lambda value: fmt.percent(100 * value, 1)),
    ("_share", lambda value: fmt.percent(100 * value, 1)),
    ("_percent", lambda value: fmt.percent(value, 1)),
    ("_ms", fmt.milliseconds),
    ("_ms_per_step", lambda value: f"{fmt.milliseconds(value)} a step"),
    ("_bytes", fmt.size),
    ("_mib", lambda value: f"{fmt.number(value)} MiB"),
    ("_c", fmt.celsius),
    ("_w", fmt.watts),
    ("_mhz", fmt.megahertz),
    ("_joules", fmt.joules),
    ("_j", fmt.joules),
    ("_seconds", fmt.duration),
    ("_s", fmt.duration),
    ("_bytes_per_s", fmt.bytes_per_second),
)
"""How a figure is shown, by the unit at the end of its name; the longest ending that fits counts."""


def named(name: str) -> str:
    """The name of a figure without the unit at its end."""
    ending = _ending(name)
    return (name.removesuffix(ending) if ending else name).replace("_", " ")


def shown(name: str, value: float | int | str | None) -> str:
    """A figure with the unit that its name carries."""
    if value is None:
        return fmt.ABSENT
    if isinstance(value, str):
        return value
    ending = _ending(name)
    if ending:
        return dict(UNITS)[ending](value)
    return f"{value:,}" if isinstance(value, int) else fmt.number(value)


def _ending(name: str) -> str:
    return max((ending for ending, _ in UNITS if name.endswith(ending)), key=len, default="")
