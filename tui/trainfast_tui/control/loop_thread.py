"""A daemon thread that works as long as the app is open."""

from __future__ import annotations

import threading
from collections.abc import Callable

from trainfast_tui.control.messages import Post, ThreadFailed


def start_loop(name: str, loop: Callable[[], object], post: Post) -> None:
    """Run `loop`, which does not return, in a thread; an exception is posted as ThreadFailed."""

    def call() -> None:
        try:
            loop()
        except Exception as error:
            # Else the last message of the thread would stay on the screen as if it were the newest.
            post(ThreadFailed(error))

    threading.Thread(target=call, name=f"trainfast-{name}", daemon=True).start()
