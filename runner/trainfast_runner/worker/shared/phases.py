"""The phases of a step, as they are timed and as their memory is measured."""

from __future__ import annotations

STEP_PHASES = ("data", "forward", "backward", "optimizer", "other")
"""Phases of a step, in their order; `other` is the remainder."""
MEMORY_PHASES = ("forward_backward", "optimizer")
"""The phases of a step whose peaks are measured apart, as in a step record's `phase_peaks`."""
