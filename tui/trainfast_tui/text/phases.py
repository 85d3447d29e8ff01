"""The tone of each phase of a step, for the screen and for reports."""

from __future__ import annotations

from trainfast_tui.text.lines import Tone

PHASE_TONES: dict[str, Tone] = {
    "data": "warning",
    "forward": "primary",
    "backward": "secondary",
    "optimizer": "accent",
    "other": "muted",
}
