"""Notices about a script's run that is about to start, for the screen and the command line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainfast_tui.text.format import plain

if TYPE_CHECKING:
    from trainfast_runner.running.planning import RunPlan


def script_notices(plan: RunPlan) -> Iterator[str]:
    """Yield a line on the knobs that the script may replace, and the reason its steps will not be seen."""
    script = plan.script
    if script is None:
        return
    if script.unconfirmed:
        names = ", ".join(script.unconfirmed)
        yield f"{names}: set without a flag, so the script may keep its own; the result lists what ran"
    if script.hooks_blocked and not script.steps_from_log:
        yield plain(f"its steps are not seen: {script.hooks_blocked}")
