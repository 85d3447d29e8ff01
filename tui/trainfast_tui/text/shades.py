"""The drawing of throttled time: each cause has a letter, a texture, a colour and words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from trainfast_runner.machine.telemetry.throttle import CAUSES
from trainfast_tui.text.ascii import to_ascii
from trainfast_tui.text.format import plain
from trainfast_tui.text.lines import Tone


@dataclass(frozen=True, slots=True)
class Shade:
    """One cause of throttling; `glyph` fills the free cells of a chart, in the colour of `tone`."""

    cause: str
    letter: str
    glyph: str
    words: str
    """The words of the legend."""
    tone: Tone


SHADES: tuple[Shade, ...] = (
    Shade("thermal", "T", "░", "throttled by heat", "error"),
    Shade("brake", "B", "▒", "power brake", "error"),
    Shade("hardware", "H", "╱", "hardware slowdown", "error"),
    Shade("power", "P", "·", "at the power limit", "warning"),
    Shade("sync_boost", "S", "┊", "sync boost", "secondary"),
)
"""The worst first: of two causes at once the worse is drawn."""

_BY_CAUSE = {shade.cause: shade for shade in SHADES}
OTHER = "other"


@lru_cache(maxsize=64)
def shade_of(cause: str) -> Shade:
    """Return the shade of a cause, always the same object; an unlisted cause gets its first letter."""
    if (known := _BY_CAUSE.get(cause)) is not None:
        return known
    letter = to_ascii(plain(cause))[:1].strip().upper() or "#"
    return Shade(OTHER, letter, "╲", to_ascii(plain(cause, 24)) or "unknown cause", "warning")


def severity_order(shade: Shade) -> int:
    """Return the shade's place, 0 for the worst; unlisted causes come last."""
    return SHADES.index(shade) if shade in SHADES else len(SHADES)


UMBRELLA = "hardware"
"""The cause that NVML sets together with a more specific one."""


CAUSE_BY_REASON = {"hw_slowdown": UMBRELLA, **{reason: cause.name for cause in CAUSES for reason in cause.reasons}}
"""The cause of each throttle reason; clocks that somebody set are no cause, because the GPU obeys them."""


def causes_of(reasons: Sequence[str] | None) -> frozenset[str]:
    """Return the causes behind a device's throttle reasons, `UMBRELLA` only if nothing more specific is set."""
    causes = frozenset(CAUSE_BY_REASON[reason] for reason in reasons or () if reason in CAUSE_BY_REASON)
    return causes - {UMBRELLA} if causes & {"thermal", "brake"} else causes
