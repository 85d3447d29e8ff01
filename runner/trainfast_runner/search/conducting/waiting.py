"""Wait for a condition in a search, which may be cancelled meanwhile."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

POLL_S = 0.02
"""Seconds between two checks of work that the search itself has begun."""
IDLE_POLL_S = 0.1
"""Seconds between two checks while a search is paused, which may take hours."""


def wait_until(
    is_over: Callable[[], bool],
    raise_if_cancelled: Callable[[], None],
    deadline_s: float = math.inf,
    poll_s: float = POLL_S,
) -> None:
    """Return once `is_over()`, at `deadline_s` (time.monotonic) at the latest; check every `poll_s` seconds."""
    while not is_over() and time.monotonic() < deadline_s:
        raise_if_cancelled()
        time.sleep(poll_s)
