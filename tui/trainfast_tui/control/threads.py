"""Work in daemon threads: it would block the event loop, and leaving the app never waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from trainfast_runner.errors import UserError
from trainfast_tui.control.messages import Message, Notified, Post, SituationGathered, ThreadFailed, TrainingPython

if TYPE_CHECKING:
    from trainfast_runner.machine.devices import Machine
    from trainfast_runner.records.home import Home
    from trainfast_runner.running.follower import RunSnapshot
    from trainfast_runner.search.advice import Situation
    from trainfast_runner.settings.spec import RunSpec
    from trainfast_tui.next_run.next_run import NextRun


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


class SituationGatherer:
    """Posts SituationGathered. Every call returns at once."""

    def __init__(self, home: Home, post: Post, python: TrainingPython) -> None:
        self._home, self._post, self._python = home, post, python
        self.situation: Situation | None = None
        """The newest facts; None while none are known of the next run's model."""
        self._key: tuple[str, str, str] | None = None
        """Name, model and shown run of the newest request."""

    def update(
        self, next_run: NextRun | None, machine: Machine | None, run: RunSnapshot | None, *, is_device_used: bool
    ) -> None:
        """Gather the facts when the next run's model or the shown run have changed, unless the device is used."""
        if is_device_used or machine is None or next_run is None or next_run.script is not None:
            return
        spec = next_run.spec
        key = (spec.name, repr(spec.model), run.run_id if run is not None else "")
        if key == self._key:
            return
        if self._key is None or key[:2] != self._key[:2]:
            self.situation = None
        self._key = key
        start_thread("advice", partial(self._gather, key, spec, machine), self._post)

    def note(self, message: SituationGathered) -> None:
        """Keep the facts; those of an earlier request are dropped."""
        if message.key == self._key:
            self.situation = message.situation

    def _gather(self, key: tuple[str, str, str], spec: RunSpec, machine: Machine) -> SituationGathered:
        from trainfast_runner.search.advice import gather

        return SituationGathered(key, gather(spec, machine, self._python))
