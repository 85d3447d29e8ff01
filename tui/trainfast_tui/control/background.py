"""Work that would block the event loop: in a daemon thread, so that leaving never waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from trainfast_runner.errors import UserError
from trainfast_tui.control.messages import Post, ThreadFailed, as_warning


def in_background(
    name: str,
    work: Callable[[], object],
    post: Post,
    refused: Callable[[UserError], object] = as_warning,
) -> threading.Thread:
    """Run `work` and post the message that it returns, or the message that `refused` makes of its error."""

    def call() -> None:
        try:
            message = work()
        except UserError as error:
            message = refused(error)
        except OSError as error:
            message = refused(UserError(f"{name}: {error}", key=name))
        except Exception as error:
            message = ThreadFailed(error)
        if message is not None:
            post(message)

    thread = threading.Thread(target=call, name=f"trainfast-{name}", daemon=True)
    thread.start()
    return thread
