"""The mark of runs on synthetic data, whose loss means nothing."""

from __future__ import annotations

from trainfast_tui.text.lines import Line

SYNTHETIC = "synthetic data"
BADGE: Line = [("  ", "text"), (f" {SYNTHETIC} ", "badge")]
