"""Gather the advisor's facts about the next run's model; never while a run is measured."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from trainfast_tui.control.messages import Post, SituationGathered, TrainingPython
from trainfast_tui.control.threads import start_thread

if TYPE_CHECKING:
    from trainfast_runner.machine.devices import Machine
    from trainfast_runner.records.home import Home
    from trainfast_runner.running.follower import RunSnapshot
    from trainfast_runner.search.advice.facts import Situation
    from trainfast_runner.settings.spec import RunSpec
    from trainfast_tui.next_run.next_run import NextRun


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
        from trainfast_runner.search.advice.gather_situation import gather

        return SituationGathered(key, gather(spec, machine, self._home, self._python))
