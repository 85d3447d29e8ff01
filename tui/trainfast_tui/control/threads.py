"""Work in daemon threads: it would block the event loop, and leaving the app never waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from trainfast_runner.errors import UserError
from trainfast_tui.control.messages import Message, Notified, Post, ThreadFailed


def as_warning(error: UserError) -> Notified:
    """Return the notice of an error that concerns no knob."""
    return Notified(error.line_without_option(), "warning")


def start_thread(
    name: str,
    work: Callable[[], Message | None],
    post: Post,
    to_message: Callable[[UserError], Message | None] = as_warning,
) -> threading.Thread:
    """Run `work` and post the message that it returns, or the message that `to_message` makes of its error."""

    def call() -> None:
        try:
            message: Message | None = work()
        except UserError as error:
            message = to_message(error)
        except OSError as error:
            message = to_message(UserError(f"{name}: {error}", key=name))
        except Exception as error:
            message = ThreadFailed(error)
        if message is not None:
            post(message)

    thread = threading.Thread(target=call, name=f"trainfast-{name}", daemon=True)
    thread.start()
    return thread


class CancellableWork:
    """One task at a time in a thread, which ends early once it is cancelled."""

    def __init__(self, name: str) -> None:
        self._thread_name = name
        self._cancelled = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        """True until the work has ended, also after it was cancelled."""
        return self._thread is not None and self._thread.is_alive()

    def start(
        self,
        work: Callable[[threading.Event], Message | None],
        post: Post,
        to_message: Callable[[UserError], Message | None] = as_warning,
    ) -> None:
        """Cancel the work under way and start this one after it, as `start_thread`.

        `work` gets the event that cancels it; an error of cancelled work is not posted.
        """
        self._cancelled.set()
        cancelled, before = threading.Event(), self._thread

        def work_after() -> Message | None:
            if before is not None:
                before.join()
            return None if cancelled.is_set() else work(cancelled)

        def refused(error: UserError) -> Message | None:
            return None if cancelled.is_set() else to_message(error)

        self._cancelled = cancelled
        self._thread = start_thread(self._thread_name, work_after, post, refused)

    def cancel(self, wait_s: float = 0.0) -> None:
        """Cancel the work under way and wait at most `wait_s` seconds until it has ended."""
        self._cancelled.set()
        if self._thread is not None and wait_s:
            self._thread.join(wait_s)
