"""Work that would hold up the event loop: in a daemon thread, so that leaving never waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from textual.message import Message

from trainfast_runner.errors import UserError
from trainfast_tui.control.messages import Broke, Refused


def in_background(
    name: str,
    work: Callable[[], Message | None],
    post: Callable[[Message], object],
    refused: Callable[[UserError], Message] = Refused,
) -> threading.Thread:
    """Run `work` and post the message it returns, or what `refused` makes of why it could not be done."""

    def call() -> None:
        try:
            message = work()
        except UserError as problem:
            message = refused(problem)
        except OSError as error:
            message = refused(UserError(f"{name}: {error}", key=name))
        except Exception as error:
            message = Broke(error)
        if message is not None:
            post(message)

    thread = threading.Thread(target=call, name=f"trainfast-{name}", daemon=True)
    thread.start()
    return thread
