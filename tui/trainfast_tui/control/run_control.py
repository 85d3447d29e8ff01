"""Start, end, explain and compare runs. Every call returns at once; its result is posted."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_directory import is_alive, state_text
from trainfast_runner.records.worker_lines import WARM_ROLES
from trainfast_runner.settings.spec import RunSpec
from trainfast_tui.control import messages
from trainfast_tui.control.threads import CancellableWork, start_thread
from trainfast_tui.text.event_words import launch_notices
from trainfast_tui.text.keys import RUN_KEY, STOP_KEY

if TYPE_CHECKING:
    from trainfast_runner.records.result import OomExplanation, Result
    from trainfast_runner.running.follower import RunSnapshot


GONE_POLL_S = 0.1
GONE_WITHIN_S = 60.0
"""Seconds that a stopped run has to be gone; its supervisor sends SIGKILL after `STOP_GRACE_S`."""


class RunControl:
    """Talks to supervisors, which outlive the app."""

    def __init__(self, home: Home, post: messages.Post, python: messages.TrainingPython) -> None:
        self._home = home
        self._python = python
        self._post = post
        self.pending = PendingStart()
        """The run that was started here until it is on the screen."""
        self.turn_words = ""
        """The run under way of those that are run in turn, `A B A B 2/4`; empty without any."""
        self.ran_in_turn: messages.RunsCompared | None = None
        """The newest settings that were run in turn."""
        self._giving_up: threading.Event | None = None
        """Exists while a run waits for another launch; setting it gives up."""

    @property
    def is_waiting(self) -> bool:
        """True while a run waits for another launch."""
        return self._giving_up is not None

    def give_up(self) -> None:
        """Start nothing after all. Does nothing when no run waits."""
        # The waiting thread may remove the event between two looks.
        if (giving_up := self._giving_up) is not None:
            giving_up.set()

    def start(self, spec: RunSpec, run_to_stop: Path | None = None) -> None:
        """Check and start a run, once `run_to_stop` is stopped and gone: posts RunStarted or RunRefused."""
        self.pending.begin()
        start_thread("start", partial(self._start, spec, run_to_stop), self._post, messages.RunRefused)

    def start_in_turn(self, a: str, b: str) -> None:
        """Run the settings of two runs again in turn, A B A B: posts RunsCompared, or why the runs ended early."""
        start_thread("in-turn", partial(self._run_in_turn, (a, b, a, b)), self._post, messages.RunRefused)

    def _run_in_turn(self, run_ids: Sequence[str]) -> messages.RunsCompared | messages.Notified:
        from trainfast_runner.running.settling import final_result

        results: list[Result] = []
        specs = [_spec_of_run(self._home.directory(run_id)) for run_id in run_ids]
        try:
            for number, spec in enumerate(specs, 1):
                self.turn_words = f"A B A B {number}/{len(specs)}"
                self.pending.begin()
                started = self._start(spec, None)
                if isinstance(started, messages.Notified):
                    return started
                self._post(started)
                while is_alive(started.directory):
                    time.sleep(GONE_POLL_S)
                results.append(final_result(self._home, started.directory.name))
                if results[-1].state != "finished":
                    words = (
                        f"{self.turn_words} {state_text(results[-1].state)}: the runs in turn end without a verdict."
                    )
                    return messages.Notified(words, "warning")
        finally:
            self.turn_words = ""
        first, second = zip(results[::2], results[1::2], strict=True)
        self.ran_in_turn = messages.RunsCompared(*second, earlier=(first,))
        return self.ran_in_turn

    def stop(self, directory: Path, *, at_once: bool = False) -> None:
        """Ask the run to end, whose supervisor kills it after the countdown; `at_once` sends SIGKILL to all of it."""
        start_thread("stop", partial(_stop, directory, at_once=at_once), self._post)

    def _start(self, spec: RunSpec, run_to_stop: Path | None) -> messages.RunStarted | messages.Notified:
        from trainfast_runner.machine.training_python import ProgramCancelled
        from trainfast_runner.running import launch
        from trainfast_runner.running.planning import plan_spec
        from trainfast_runner.search.predicted_speed import with_predicted_speed

        # A refusal comes before anything is stopped for this run.
        plan = plan_spec(spec, self._python)
        if run_to_stop is not None:
            self.stop_and_wait(run_to_stop)
            plan = replace(plan, asked_ns=0)
        if notices := list(launch_notices(plan)):
            # One message: the status line shows only the newest.
            self._post(messages.Notified("; ".join(notices)))

        def on_wait(holder: str) -> None:
            if holder:
                self._giving_up = threading.Event()
                self._post(messages.Notified(f"Waiting for {holder}; {STOP_KEY} gives up", "warning"))
            if self._giving_up is not None and self._giving_up.is_set():
                raise ProgramCancelled

        try:
            return messages.RunStarted(launch.start(with_predicted_speed(plan, self._home), self._home, on_wait))
        except ProgramCancelled:
            self.pending.note_refused()
            return messages.Notified("The wait was given up; nothing was started.")
        finally:
            self._giving_up = None

    def stop_and_wait(self, directory: Path) -> None:
        """Stop a run and wait until all its processes are gone; not on the event loop. Raises UserError."""
        from trainfast_runner.running.present_state import run_state

        if is_alive(directory):
            try:
                _stop(directory)
            except UserError:
                # A run that has just ended by itself refuses to be stopped; its processes may take a moment more.
                if not run_state(directory).ended:
                    raise
        deadline = time.monotonic() + GONE_WITHIN_S
        while is_alive(directory):
            if time.monotonic() > deadline:
                raise UserError(f"{directory.name} is still there: {STOP_KEY} again kills it", key=directory.name)
            time.sleep(GONE_POLL_S)


def _spec_of_run(directory: Path) -> RunSpec:
    """Return the settings that repeat a run. Raises UserError if its record does not tell them all."""
    from trainfast_runner.records.run_directory import read_run_file
    from trainfast_tui.next_run.sources import repeat_run

    run_file = read_run_file(directory)
    next_run = repeat_run(run_file) if run_file is not None else None
    if next_run is None:
        raise UserError(f"{directory.name} cannot be run again by its knobs", key=directory.name)
    return next_run.spec


def _stop(directory: Path, *, at_once: bool = False) -> messages.Notified:
    from trainfast_runner.running.present_state import STOP_GRACE_S
    from trainfast_runner.running.settling import kill_now, request_stop, stop_unsupervised

    if (kill_now if at_once else request_stop)(directory):
        return messages.Notified("The run was killed." if at_once else "The run was asked to stop.")
    stop_unsupervised(directory, 0.0 if at_once else STOP_GRACE_S, lambda left_s: None)
    return messages.Notified("The run was stopped and cleaned up.")


class PendingStart:
    """A start of a run or a search: begun, then started or refused, then seen."""

    _is_begun = False
    _unseen_directory: Path | None = None
    """The run or search that was started and that the reader does not show yet."""

    @property
    def is_pending(self) -> bool:
        """True if a start was begun that has neither been refused nor seen."""
        return self._is_begun or self._unseen_directory is not None

    def begin(self) -> None:
        """Record that a thread is starting a run or a search."""
        self._is_begun = True

    def note_started(self, directory: Path) -> None:
        """Record that the run or search holds its lock; the reader may still show an earlier one."""
        self._is_begun, self._unseen_directory = False, directory

    def note_refused(self) -> None:
        """Record that nothing was started."""
        self._is_begun = False

    def note_seen(self, directory: Path | None) -> bool:
        """Record the shown run or search; return True if it was started here."""
        unseen = self._unseen_directory
        if unseen is not None and (directory == unseen or not unseen.exists()):
            self._unseen_directory = None
        return unseen is not None and directory == unseen

    def stop_waiting(self) -> None:
        """Stop waiting for the started run or search: a person chose to see another."""
        self._unseen_directory = None


class OomExplainer:
    """Posts `OomExplained` each time more is known.

    `python` is the path of the training Python, None for the run's own.
    """

    def __init__(self, post: messages.Post, python: str | None) -> None:
        self._post = post
        self._python = python
        self._explained_run_id: str | None = None
        self._newest_message: messages.OomExplained | None = None
        self._work = CancellableWork("explain")

    def explanation_of(self, run: RunSnapshot) -> tuple[OomExplanation | None, int]:
        """Return the explanation of an out-of-memory run, traced if it is, and the number of traces left.

        The explanation is None for a run that ended otherwise, and before its result is written.
        """
        if run.state != "oom":
            return None, 0
        explanation = run.result.oom if run.result is not None else None
        traced = self._newest_message
        if traced is None or traced.run_id != run.run_id:
            return explanation, 0
        if explanation is None or explanation.needed_bytes is None or traced.explanation.needed_bytes is not None:
            explanation = traced.explanation
        return explanation, traced.traces_left

    def explain_if_oom(self, run: RunSnapshot | None, *, may_trace: bool) -> None:
        """Explain this run if it ran out of memory; give up the trace under way unless `may_trace`.

        Nothing is traced for a script, which has no model here.
        """
        run_file, result = (run.run_file, run.result) if run is not None else (None, None)
        is_oom = result is not None and result.state == "oom" and run_file is not None and run_file.script is None
        if not may_trace or not is_oom:
            self.cancel()
        elif result is not None and run is not None and result.run_id != self._explained_run_id:
            self._explained_run_id = result.run_id
            self._work.start(partial(self._explain, run.directory, result), self._post)

    def cancel(self, wait_s: float = 0.0) -> None:
        """End the trace under way and wait at most `wait_s` seconds until its process is gone.

        The same run may be explained again afterwards.
        """
        self._explained_run_id = None
        self._work.cancel(wait_s)

    def note(self, message: messages.OomExplained) -> None:
        """Keep the newest explanation."""
        self._newest_message = message

    def _explain(self, directory: Path, result: Result, cancelled: threading.Event) -> messages.OomExplained | None:
        from trainfast_runner.memory.oom import explain_run, models_of, out_of_memory_of, trace_changes
        from trainfast_runner.records.run_directory import read_records

        records = read_records(directory)
        if records.run is None:
            return None
        oom_run = out_of_memory_of(records, records.run, result.reason, result.error)
        python = self._python or records.run.python or None

        def explained(traces_left: int) -> messages.OomExplained:
            explanation = explain_run(oom_run, models_of(oom_run.run, python))
            return messages.OomExplained(result.run_id, explanation, traces_left)

        with suppress(UserError):  # a change that cannot be traced stays an estimate
            for traces_left in trace_changes(oom_run, python, cancelled):
                self._post(explained(traces_left))
        return explained(0)


def compared_runs(home: Home, a: str, b: str) -> messages.RunsCompared:
    """Return the results of two runs. Raises UserError for a run that has not ended."""
    from trainfast_runner.running.settling import final_result

    return messages.RunsCompared(final_result(home, a), final_result(home, b))


def compared_with_previous(home: Home, run_id: str) -> messages.RunsCompared:
    """Return a run and the newest finished run before it, else the newest one after it; A is the older.

    Raises UserError if there is none.
    """
    from trainfast_runner.running.settling import final_result, recover_result

    ids = home.run_ids()
    before = [other_id for other_id in ids if other_id < run_id]
    after = [other_id for other_id in ids if other_id > run_id]
    for other_id in (*reversed(before), *reversed(after)):
        result = recover_result(home.directory(other_id))
        # A warm process tries many settings, so it has no result of one.
        if result is not None and result.state == "finished" and result.role not in WARM_ROLES:
            a, b = sorted((result, final_result(home, run_id)), key=lambda ran: ran.run_id)
            return messages.RunsCompared(a, b)
    raise UserError(f"There is no other finished run to compare with; turn a knob and press {RUN_KEY}.", key=run_id)
