"""The repaint period: late frames mean that the terminal or a busy CPU cannot take more."""

from __future__ import annotations

SHORTEST_PERIOD_S = 0.5
PERIOD_BESIDE_TRAINING_S = 1.0
"""The period while a run trains on this CPU: a frame takes milliseconds of a core that all its threads wait for."""
LONGEST_PERIOD_S = 4.0
LATE_AFTER_S = 0.4
"""A snapshot that waited longer than this for the event loop was delayed by output or by a busy CPU."""
MAX_UNWRITTEN_TEXTS = 3
"""More unwritten texts than this mean a slow terminal: a frame is one text, or three with synchronized output."""
FRAMES_TO_SPEED_UP = 6
"""Frames in time before the period is halved."""


class Pacer:
    """Double the period when frames are late; halve it after a calm time."""

    def __init__(self) -> None:
        self.period_s = SHORTEST_PERIOD_S
        self._calm = 0

    def note(self, late_s: float, unwritten_texts: int = 0, *, trains_on_cpu: bool = False) -> float:
        """Count one snapshot's delay and the texts still unwritten; return the period from now on."""
        if late_s > LATE_AFTER_S or unwritten_texts > MAX_UNWRITTEN_TEXTS:
            self.period_s = min(LONGEST_PERIOD_S, self.period_s * 2)
            self._calm = 0
        else:
            self._calm += 1
            if self._calm >= FRAMES_TO_SPEED_UP and self.period_s > SHORTEST_PERIOD_S:
                self.period_s = max(SHORTEST_PERIOD_S, self.period_s / 2)
                self._calm = 0
        return max(self.period_s, PERIOD_BESIDE_TRAINING_S) if trains_on_cpu else self.period_s

    @property
    def words(self) -> str:
        """The footer's notice while frames are late; empty otherwise."""
        return (
            f"the screen is behind: repainting every {self.period_s:g} s" if self.period_s > SHORTEST_PERIOD_S else ""
        )
