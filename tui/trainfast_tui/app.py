"""The Textual app: what lives longer than a screen, and where messages from other threads arrive."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from textual import events
from textual.app import SystemCommand
from textual.screen import Screen

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_tui.control.background import in_background
from trainfast_tui.control.machine_look import look_at_machine, situation_of
from trainfast_tui.control.messages import (
    Broke,
    Compared,
    MachineSeen,
    MemoryForeseen,
    OomExplained,
    Refused,
    RunStarted,
    Said,
    SearchRefused,
    SearchStarted,
    SituationSeen,
    SnapshotTaken,
    TerminalLost,
    Told,
    said_no,
)
from trainfast_tui.control.next_run import NextRun, of_preset, of_run
from trainfast_tui.control.oom_explainer import Explainer
from trainfast_tui.control.predictor import Forecaster, Question, knows_free, question_about
from trainfast_tui.control.run_control import RunControl
from trainfast_tui.control.search_control import SearchControl
from trainfast_tui.live.reader import Reader
from trainfast_tui.live.snapshot import Snapshot
from trainfast_tui.screens.main import MainScreen
from trainfast_tui.terminal import frame_output, themes
from trainfast_tui.terminal.pacing import Pacer
from trainfast_tui.terminal.textual_app import TerminalApp
from trainfast_tui.text.keys import ACTIONS, bindings

if TYPE_CHECKING:
    from trainfast_runner.machine.devices import Machine
    from trainfast_runner.memory.warm_tracer import WarmTracer
    from trainfast_runner.running.follower import RunSnapshot
    from trainfast_runner.search.advice.advisor import Situation
    from trainfast_runner.settings.spec import RunSpec

GONE_S = 0.5
"""What a trace gets to be gone when the app is left; it takes a tenth of a second."""
CPU_PRESET, GPU_PRESET = "tiny-llama", "gpt2-medium"


class TrainfastApp(TerminalApp):
    """`next_run` is what `r` would start; `snapshot` the newest of the reader's."""

    TITLE = "trainfast-tui"
    BINDINGS = [*bindings("everywhere")]
    ENABLE_COMMAND_PALETTE = True
    DROPPED_ON_LEAVING = (Told,)

    def __init__(
        self,
        home: Home,
        *,
        ascii: bool = False,
        preset: str | None = None,
        python: str | None = None,
        directory: Path | None = None,
        plain_output: bool = False,
    ) -> None:
        super().__init__(ascii=ascii, plain_output=plain_output)
        self.home = home
        self.machine: Machine | None = None
        self.next_run: NextRun | None = None
        self.snapshot: Snapshot | None = None
        self.situation: Situation | None = None
        self.touched = preset is not None
        self.control = RunControl(home, self.post_message, python)
        self.searching = SearchControl(home, self.post_message, python)
        self.reader = Reader(home, self._post_snapshot, self._post_broke, directory=directory)
        self._preset = preset
        self._python = python
        self._pacer = Pacer()
        self._tracer: WarmTracer | None = None
        self._tracer_lock = threading.Lock()
        self.forecaster = Forecaster(self.post_message, python, self.warm_tracer)
        self.explainer = Explainer(self.post_message, python, self.warm_tracer)
        self._foreseen_for: tuple[RunSpec, Machine, bool, str, bool] | None = None
        self._looked_for: tuple[str, str, str] | None = None
        self._adopted: str | None = None
        self._told_elsewhere: str | None = None
        self._typed_on: WeakKeyDictionary[events.Key, Screen[Any]] = WeakKeyDictionary()
        """The screen that was on top when a key arrived."""

    def warm_tracer(self) -> WarmTracer:
        """The one tracer of all threads; made by the thread that traces first, so the first frame imports nothing."""
        from trainfast_runner.memory.warm_tracer import WarmTracer

        with self._tracer_lock:
            if self._tracer is None:
                self._tracer = WarmTracer()
            return self._tracer

    def get_default_screen(self) -> Screen[Any]:
        """The main screen is the one at the bottom."""
        self._choose_preset(self._preset or (GPU_PRESET if os.path.exists("/dev/nvidia0") else CPU_PRESET))
        return MainScreen(ascii=self.ascii)

    def on_mount(self) -> None:
        # Whatever is not needed for the first frame waits for it.
        self.call_after_refresh(self.begin)

    def begin(self) -> None:
        """Start the threads that look at runs and machine."""
        gc.freeze()
        gc.enable()
        self.reader.start()
        in_background("machine", lambda: look_at_machine(self._python), self.post_message, said_no)

    def on_unmount(self) -> None:
        # A trace is a process of its own, which would go on without us.
        self.forecaster.stop(GONE_S)
        self.explainer.stop(GONE_S)
        if self._tracer is not None:
            self._tracer.close()
        self.reader.stop()

    @property
    def main(self) -> MainScreen:
        """The main screen, on top or below another."""
        screen = self.screen_stack[0]
        assert isinstance(screen, MainScreen)
        return screen

    async def take_event(self, event: events.Event) -> None:
        """Keys that were typed ahead of a dialog go to it, though the screen below it was asked first."""
        if isinstance(event, events.Key):
            from trainfast_tui.screens.dialogs import Dialog

            screen = self.screen
            if not event.is_forwarded:
                self._typed_on[event] = screen
            early = self._typed_on.get(event, screen) is not screen
            if isinstance(screen, Dialog) and (early or (screen.focused is None and not screen.is_ready)):
                screen.take(event)
                return
        await super().take_event(event)

    def _post_snapshot(self, snapshot: Snapshot) -> None:
        self.post_message(SnapshotTaken(snapshot))

    def _post_broke(self, error: BaseException) -> None:
        self.post_message(Broke(error))

    def on_snapshot_taken(self, message: SnapshotTaken) -> None:
        snapshot = self.snapshot = message.snapshot
        late_s = (time.monotonic_ns() - message.posted_ns) / 1e9
        trains_on_cpu = snapshot.run is not None and snapshot.run.trains_on_cpu
        self.reader.period_s = self._pacer.note(late_s, self.unwritten_frames(), trains_on_cpu=trains_on_cpu)
        self._adopt(snapshot)
        self._show_search(snapshot)
        self.look_around()
        self.foresee()
        self.control.note_shown(snapshot.run.directory if snapshot.run is not None else None)
        self._tell_elsewhere(snapshot.elsewhere)
        # A dialog leaves the screen below it in sight.
        in_sight = next(screen for screen in reversed(self.screen_stack) if not screen.is_modal)
        if not in_sight.children or not self.main.is_ready:
            # Its widgets are not there yet, or on leaving not any more.
            return
        for name, value in (("show_pace", self._pacer.words), ("show_snapshot", snapshot)):
            if (show := getattr(in_sight, name, None)) is not None:
                show(value)

    def _tell_elsewhere(self, run_id: str | None) -> None:
        """Say once that somebody started a run; the one that this app just started comes onto the screen by itself."""
        if run_id is None or run_id == self._told_elsewhere or self.control.is_starting:
            return
        self._told_elsewhere = run_id
        self.post_message(Said(f"{run_id} was started elsewhere: h lists it, Enter there shows it."))

    def show_run(self, directory: Path) -> None:
        """Follow this run on the main screen; its knobs become the next run's."""
        self.touched, self._adopted = False, None
        self.control.note_left()
        self.reader.follow(directory)

    def on_machine_seen(self, message: MachineSeen) -> None:
        self.machine = message.machine
        if not self.touched and self._adopted is None:
            self._choose_preset(GPU_PRESET if message.machine.device == "cuda" else CPU_PRESET)
        self.look_around()
        self.foresee()
        self.main.show_knobs()

    def look_around(self) -> None:
        """Gather what the advisor needs when model or history have changed; never while a run is measured."""
        machine, next_run, snapshot = self.machine, self.next_run, self.snapshot
        run = snapshot.run if snapshot is not None else None
        if machine is None or next_run is None or (run is not None and run.is_live):
            return
        spec = next_run.spec
        key = (spec.name, repr(spec.model), run.run_id if run is not None else "")
        if key == self._looked_for:
            return
        if self._looked_for is None or key[:2] != self._looked_for[:2]:
            self.situation = None
        self._looked_for = key
        self.gather(spec, machine)

    def foresee(self) -> None:
        """Predict the next run's memory when its knobs have changed, or when a run has begun or ended."""
        run = self.snapshot.run if self.snapshot is not None else None
        searches, live = self.searching.is_going_on, run is not None and run.is_live
        self.explain(run, may_trace=not (searches or live or self.control.is_starting))
        if self.next_run is None or self.machine is None:
            return
        # While a run only starts a trace goes on: it is that run's prediction, and nothing is measured yet. Not on a
        # GPU, where it has memory of its own and the run would take it for somebody else's.
        measured = run is not None and run.is_live and run.state != "starting"
        on_gpu = self.machine.used_by(self.next_run.spec.knobs["devices"]).device == "cuda"
        is_busy = searches or measured or (on_gpu and (live or self.control.is_starting))
        # How much is free moves with every tick; that it is known is news, how much then waits for the next question.
        run_id = run.run_id if run is not None else ""
        key = (self.next_run.spec, self.machine, is_busy, run_id, knows_free(self.snapshot))
        if key != self._foreseen_for:
            self._foreseen_for = key
            self.predict(question_about(self.next_run, self.machine, self.snapshot, may_trace=not is_busy))

    def predict(self, question: Question) -> None:
        """Have the question answered in a thread."""
        self.forecaster.ask(question)

    def explain(self, run: RunSnapshot | None, *, may_trace: bool) -> None:
        """Have it traced in a thread what would make a run fit that ran out of memory."""
        self.explainer.look(run, may_trace=may_trace)

    def on_oom_explained(self, message: OomExplained) -> None:
        self.explainer.note(message)
        if self.snapshot is not None:
            self.main.show_snapshot(self.snapshot)

    def on_memory_foreseen(self, message: MemoryForeseen) -> None:
        self.main.show_memory(message.view)

    def gather(self, spec: RunSpec, machine: Machine) -> None:
        """Ask for the situation in a thread."""
        in_background(
            "advice", partial(situation_of, spec, machine, self.home, self._python), self.post_message, said_no
        )

    def on_situation_seen(self, message: SituationSeen) -> None:
        self.situation = message.situation
        if self.main.is_ready:
            self.main.show_knobs()

    def on_run_started(self, message: RunStarted) -> None:
        self.control.note_started(message.directory)
        self.reader.follow(message.directory)

    def on_search_started(self, message: SearchStarted) -> None:
        self.searching.note_started(message.directory)
        self.reader.follow_search(message.directory)

    def on_search_refused(self, message: SearchRefused) -> None:
        self.searching.note_refused()
        getattr(self.screen, "refuse", self.main.refuse)(message.problem)

    def _show_search(self, snapshot: Snapshot) -> None:
        """On its screen where that is in sight; elsewhere only its end is said."""
        ended = self.searching.note_seen(snapshot.search)
        screen: Any = self.screen
        if getattr(screen, "SCOPE", "") == "search":
            screen.show(self.searching.current, snapshot.taken_ns)
        elif ended:
            self.main.say(f"The search has ended: {ended}. b shows it.")

    def on_refused(self, message: Refused) -> None:
        self.control.note_refused()
        self._refuse(message.problem)
        self._say_on_top(message.problem.line(), "error")

    def on_said(self, message: Said) -> None:
        self.main.say(message.text, message.tone)
        self._say_on_top(message.text, message.tone)

    def _say_on_top(self, text: str, tone: str) -> None:
        """On the screen in sight as well, where that is another one."""
        say = getattr(self.screen, "say", None)
        if say is not None and self.screen is not self.main:
            say(text, tone)

    def on_compared(self, message: Compared) -> None:
        from trainfast_tui.screens.compare import CompareScreen

        self.push_screen(CompareScreen(message.a, message.b, ascii=self.ascii))

    def on_broke(self, message: Broke) -> None:
        raise message.error

    def on_terminal_lost(self, message: TerminalLost) -> None:
        self.exit(0)

    def action_help(self) -> None:
        from trainfast_tui.screens.help import HelpScreen

        scope = getattr(self.screen, "SCOPE", "main")
        self.push_screen(HelpScreen(scope=scope, ascii=self.ascii))

    def action_theme(self) -> None:
        self.main.say(f"theme: {themes.turn(self)}")

    def action_repaint(self) -> None:
        frame_output.forget(self.console)
        self.screen.refresh()

    async def action_quit(self) -> None:
        self.exit(0)

    def compare_with_previous(self, run_id: str) -> None:
        """Open the comparison of a run with the finished one before it, or else the newest other one."""
        from trainfast_tui.screens.compare import previous_of

        in_background("compare", partial(previous_of, self.home, run_id), self.post_message, said_no)

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """The palette: the commands of this screen, from the one list of them."""
        scope = getattr(screen, "SCOPE", "main")
        for command in ACTIONS:
            if command.palette and command.scope in (scope, "everywhere"):
                prefix = "app" if command.scope == "everywhere" else "screen"
                run = partial(self._palette_action, f"{prefix}.{command.id}")
                yield SystemCommand(f"{command.label} ({command.key})", command.help, run)

    async def _palette_action(self, action: str) -> None:
        await self.run_action(action)

    def _choose_preset(self, name: str) -> None:
        try:
            self.next_run = of_preset(name)
        except UserError as problem:
            self.call_after_refresh(partial(self._refuse, problem))

    def _refuse(self, problem: UserError) -> None:
        self.main.refuse(problem)

    def _adopt(self, snapshot: Snapshot) -> None:
        """The knobs of a run that comes onto the screen are those the next one is compared with."""
        run = snapshot.run.run if snapshot.run is not None else None
        if run is None or run.run_id == self._adopted:
            return
        self._adopted = run.run_id
        if self.touched and self.next_run is not None:
            self.next_run = self.next_run.compared_with(run.knobs)
        else:
            self.next_run = of_run(run, self.home)
        self.main.show_knobs()


def run_app(
    home: Home,
    ascii: bool = False,
    preset: str | None = None,
    python: str | None = None,
    plain_output: bool = False,
) -> int:
    """Open the app and return its exit status; says on leaving that a run goes on.

    Raises UserError, before anything is drawn, for a preset that cannot be loaded.
    """
    from trainfast_tui.terminal.hangup import watch

    if preset is not None:
        of_preset(preset)
    app = TrainfastApp(home, ascii=ascii, preset=preset, python=python, plain_output=plain_output)
    watch(sys.stdin.fileno(), lambda: app.post_message(TerminalLost()))
    # Without the mouse the terminal's own selection works, and no movement is sent over the link.
    status = app.run(mouse=False)
    if app.searching.is_going_on:
        print("The search for the largest batch goes on without this screen. Come back with: trainfast-tui    then b")
    run = app.snapshot.run if app.snapshot is not None else None
    if run is not None and run.is_live:
        print(f"{run.run_id} goes on without this screen.")
        print(f"Come back with: trainfast-tui    follow it with: trainfast-tui attach {run.run_id}")
    return app.return_code or status or 0
