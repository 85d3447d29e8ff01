"""State that lives longer than a screen, without Textual.

The next run, the machine, the newest snapshot, and the threads that read, predict, start and stop.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.settings.presets import PLAIN_PRESET
from trainfast_tui.control import messages
from trainfast_tui.control.background_work import BackgroundWork
from trainfast_tui.control.messages import Changes, Notified
from trainfast_tui.control.run_control import RunControl, compared_runs, compared_with_previous
from trainfast_tui.control.search_control import Searches
from trainfast_tui.control.threads import CancellableWork, start_thread
from trainfast_tui.live.reader import Reader
from trainfast_tui.live.snapshot import SearchKind
from trainfast_tui.next_run.next_run import NextRun
from trainfast_tui.next_run.sources import next_run_from_preset, repeat_run
from trainfast_tui.text.keys import RUN_KEY

if TYPE_CHECKING:
    from trainfast_runner.machine.devices import Machine
    from trainfast_runner.running.follower import RunSnapshot
    from trainfast_runner.search.best_journal import BestRequest
    from trainfast_runner.settings.spec import RunSpec
    from trainfast_tui.live.snapshot import Snapshot

GPU_PRESET = "gpt2-medium"
END_TRACES_S = 0.5
"""Time for a trace's process to end when the app is left."""


class Session:
    """State that screens read and change in the event loop; `listener` gets the messages of threads."""

    def __init__(self, home: Home, *, preset: str | None = None, python: str | None = None) -> None:
        """`preset` is the first next run, else one for the machine.

        `python` is the path of the training Python; None for the app's.
        """
        self.home = home
        self.cwd = os.getcwd()
        """The folder that the app was started in."""
        self.listener: messages.Post | None = None
        self.on_change: Callable[[Changes], object] | None = None
        """Repaints what a call of a screen has changed."""
        self.machine: Machine | None = None
        first_preset = GPU_PRESET if os.path.exists("/dev/nvidia0") else PLAIN_PRESET
        self.next_run, self.refusal = _load_next_run(first_preset if preset is None else preset)
        """The next run, or the reason its preset could not be loaded."""
        self.snapshot: Snapshot | None = None
        self.run_control = RunControl(home, self.post, python)
        self.searches = Searches(home, self.post, python)
        self.background = BackgroundWork(home, self.post, python)
        self.discovery = CancellableWork("discovery")
        """Looks into a script, one at a time."""
        self.reader = Reader(
            home,
            lambda snapshot: self.post(messages.SnapshotTaken(snapshot)),
            on_failure=lambda error: self.post(messages.ThreadFailed(error)),
        )
        self.python = python
        # The next run is a preset for the machine, then repeats each run that comes onto the screen, then keeps the
        # knobs that were chosen; opening a run makes the next run repeat runs again.
        self._keeps_knobs = preset is not None
        """True from a choice of knobs until a run is opened: neither a run nor the machine replaces the next run."""
        self._adopted_run_id: str | None = None
        """The newest run that the next run repeats or is compared with; None before one and once a run was opened."""

    def post(self, message: messages.Message) -> None:
        """Hand a message to the listener; from any thread."""
        if self.listener is not None:
            self.listener(message)

    def start(self) -> None:
        """Start the threads that look at runs and machine."""
        self.reader.start()
        start_thread("machine", self._look_at_machine, self.post)

    def stop(self) -> None:
        """End the threads, and traces, which are processes that would outlive the app."""
        self.background.stop(END_TRACES_S)
        self.discovery.cancel(END_TRACES_S)
        self.reader.stop()

    @property
    def shown_run(self) -> RunSnapshot | None:
        """The run on the screen."""
        return self.snapshot.run if self.snapshot is not None else None

    @property
    def live_run(self) -> RunSnapshot | None:
        """The run on the screen while it is live."""
        return self.snapshot.live_run if self.snapshot is not None else None

    @property
    def other_live_run_id(self) -> str | None:
        """Id of a live run that is not on the screen; None while a run started here is not shown yet."""
        is_own = self.run_control.pending.is_pending
        return None if self.snapshot is None or is_own else self.snapshot.other_live_run_id

    def run_words(self, run_id: str) -> str:
        """Return a run by the number of its launch, `run 12`; its id if this home did not launch it."""
        number = self.home.launch_numbers().get(run_id)
        return run_id if number is None else f"run {number}"

    def receive(self, message: messages.Message) -> Changes:
        """Take in a message of a thread, and return what it changed for the app to repaint."""
        match message:
            case messages.SnapshotTaken(snapshot):
                return self._on_snapshot(snapshot)
            case messages.MachineSeen(machine):
                return self._on_machine(machine)
            case messages.SituationGathered():
                self.background.note_situation(message)
                return Changes(next_run=True)
            # A late answer for the model before the script is dropped.
            case messages.NextRunPredicted() if self.next_run is None or self.next_run.script is None:
                self.background.memory, self.background.speed = message.memory, message.speed
            case messages.OomExplained():
                self.background.oom_explainer.note(message)
            case messages.RunStarted(directory):
                self.run_control.pending.note_started(directory)
                self.reader.follow(directory)
            case messages.RunRefused():
                self.run_control.pending.note_refused()
            case messages.SearchStarted(directory, kind):
                self.searches.of(kind).note_started(directory)
                self.reader.follow_search(directory, kind)
            case messages.SearchRefused(_, kind):
                self.searches.of(kind).note_refused()
            case Notified():
                return Changes(notices=(message,))
        return Changes()

    def _on_snapshot(self, snapshot: Snapshot) -> Changes:
        self.snapshot = snapshot
        is_adopted = self._adopt(snapshot)
        notices = self.searches.of(SearchKind.BATCH).note_seen(snapshot.batch_search)
        notices += self.searches.of(SearchKind.BEST).note_seen(snapshot.best_search)
        self.update_background_work()
        self.run_control.pending.note_seen(snapshot.run.directory if snapshot.run is not None else None)
        return Changes(next_run=is_adopted, notices=tuple(notices))

    def _adopt(self, snapshot: Snapshot) -> bool:
        """Compare the next run with a run that has come onto the screen; unless knobs were chosen, repeat that run.

        Return True if the next run has changed.
        """
        run_file = snapshot.run.run_file if snapshot.run is not None else None
        if run_file is None or run_file.run_id == self._adopted_run_id:
            return False
        self._adopted_run_id = run_file.run_id
        if self._keeps_knobs and self.next_run is not None:
            self.next_run = self.next_run.compared_with(run_file)
            return True
        self.next_run = repeat_run(run_file) or self.next_run
        return True

    def _on_machine(self, machine: Machine) -> Changes:
        self.machine, refusal = machine, None
        if not self._keeps_knobs and self._adopted_run_id is None:
            try:
                self.next_run = next_run_from_preset(GPU_PRESET if machine.device == "cuda" else PLAIN_PRESET)
            except UserError as error:
                refusal = error
        self.update_background_work()
        return Changes(next_run=True, refusal=refusal)

    def show_run(self, directory: Path) -> None:
        """Follow this run on the main screen; its knobs become the next run's."""
        if self._keeps_knobs and (old := self.next_run) is not None:
            turned = [f"{name}={old.text_of(name)}" for name in old.spec.overrides if "." not in name]
            settings = " ".join([old.spec.name, *old.typed_field_overrides(), *turned])
            self._changed(Changes(notices=(Notified(f"before this run was opened, the next run was {settings}"),)))
        self._keeps_knobs, self._adopted_run_id = False, None
        self.run_control.pending.stop_waiting()
        self.reader.follow(directory)

    def set_next_run(self, next_run: NextRun, knob: str = "", notice: str = "") -> NextRun:
        """Replace the next run, and return it as compared with the run on the screen.

        It stays from now on. The cursor goes to `knob` where one is named.
        """
        shown_run = self.shown_run
        self.next_run = next_run.compared_with(shown_run.run_file if shown_run is not None else None)
        self._keeps_knobs = True
        self.update_background_work()
        self._changed(Changes(next_run=True, knob=knob, notices=(Notified(notice),) if notice else ()))
        return self.next_run

    def set_knobs(self, settings: Iterable[tuple[str, str]], next_run: NextRun | None = None) -> bool:
        """Give `next_run`, or else the present one, these values as typed; return False if one is refused."""
        next_run, knob_texts = next_run or self.next_run, list(settings)
        if next_run is None or not knob_texts:
            return False
        try:
            for name, text in knob_texts:
                next_run = next_run.with_value(name, text)
        except UserError as error:
            self._changed(Changes(refusal=error))
            return False
        words = f"{', '.join(f'{name} = {text}' for name, text in knob_texts)}; {RUN_KEY} runs it"
        self.set_next_run(next_run, knob_texts[0][0], words)
        return True

    def _changed(self, changes: Changes) -> None:
        if self.on_change is not None:
            self.on_change(changes)

    def set_preset(self, name: str) -> NextRun:
        """Train this preset or variant next. Raises UserError."""
        return self.set_next_run(next_run_from_preset(name))

    def start_run(self, next_run: NextRun, run_to_stop: Path | None = None) -> None:
        """Start this run, after `run_to_stop` has ended."""
        self.run_control.start(next_run.spec, run_to_stop)
        self.update_background_work()

    def start_search(
        self,
        kind: SearchKind,
        spec: RunSpec,
        run_to_stop: Path | None = None,
        *,
        fresh: bool = False,
        best: BestRequest | None = None,
    ) -> None:
        """Start a search of `spec`, after `run_to_stop` has ended; unless `fresh` its unfinished one goes on.

        `best` is the question of a best-fit search.
        """
        stop_run_first = None if run_to_stop is None else partial(self.run_control.stop_and_wait, run_to_stop)
        self.searches.of(kind).start(spec, fresh=fresh, best=best, stop_run_first=stop_run_first)
        self.update_background_work()

    def advice(self) -> dict[str, str]:
        """Return the advisor's text for each knob that has one."""
        return {} if self.next_run is None else self.next_run.advice(self.machine, self.background.situation)

    def compare(self, a: str, b: str) -> None:
        """Have two runs compared: posts RunsCompared."""
        start_thread("compare", partial(compared_runs, self.home, a, b), self.post)

    def compare_with_previous(self, run_id: str) -> None:
        """Compare a run with those it ran in turn with, else with the one before or after it: posts RunsCompared."""
        ran_in_turn = self.run_control.ran_in_turn
        if ran_in_turn is not None and run_id == ran_in_turn.b.run_id:
            self.post(ran_in_turn)
            return
        start_thread("compare", partial(compared_with_previous, self.home, run_id), self.post)

    def update_background_work(self) -> None:
        """Begin or give up background work after a change."""
        self.background.update(
            self.next_run,
            self.machine,
            self.snapshot,
            self.searches.running_kind,
            is_device_used=self.is_device_used,
            has_other_live_run=self.other_live_run_id is not None,
        )

    @property
    def is_device_used(self) -> bool:
        """True while a search or a run is going on, shown or not, or a run is being started."""
        has_live_run = self.live_run is not None or self.other_live_run_id is not None
        return has_live_run or self.searches.running_kind is not None or self.run_control.pending.is_pending

    def _look_at_machine(self) -> messages.MachineSeen:
        """Return the machine as the training Python's torch can use it; without a torch there is no GPU to train on."""
        from trainfast_runner.machine.devices import detect_machine
        from trainfast_runner.machine.warm_python import inspect

        try:
            versions = inspect(self.python, {}, "causal-lm").versions
        except UserError:
            versions = {}
        return messages.MachineSeen(detect_machine(versions))


def _load_next_run(preset: str) -> tuple[NextRun | None, UserError | None]:
    """Return the next run of a preset, or the reason it cannot be loaded."""
    try:
        return next_run_from_preset(preset), None
    except UserError as error:
        return None, error
