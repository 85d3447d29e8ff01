"""Wait until the app has nothing left to do, where Textual's pilot guesses from how busy the processor is."""

from __future__ import annotations

import asyncio

from textual._context import active_app
from textual.app import App

ROUNDS = 500
"""A screen that wants to be painted for ever is a defect, and is looked at as it is."""


async def settled(min_sleep: float = 0.0, max_sleep: float = 0.0) -> None:
    """Wait until every message has been handled and the screen is painted, whatever else the machine does meanwhile.

    Takes the place of `textual._wait.wait_for_idle`, which takes a process that got no processor for an idle one. A
    test waits by itself for other threads and for timers.
    """
    for _ in range(ROUNDS):
        await _nothing_ready()
        if not _paint(active_app.get(None)):
            return


async def _nothing_ready() -> None:
    """Wait until all tasks wait: for a message, a thread or a time."""
    ready = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]
    idle_rounds = 0
    while idle_rounds < 2:
        await asyncio.sleep(0)
        idle_rounds = 0 if ready else idle_rounds + 1


def _paint(app: App[object] | None) -> bool:
    """Resize and paint what the app's timers would; False if there was nothing to do."""
    if app is not None and app._resize_event is not None:
        app._check_resize()
        return True
    screen = app.screen_stack[-1] if app is not None and app._running and app.screen_stack else None
    if app is None or screen is None or not screen.is_running or app._batch_count:
        return False
    wanted = screen._layout_required or screen._scroll_required or screen._repaint_required
    if not (wanted or screen._recompose_required or screen._dirty_widgets or screen._callbacks):
        return False
    screen._on_timer_update()
    return True
