"""The main screen: devices, charts, the run's numbers, and the knobs of the next run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from textual import events
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.geometry import Size
from textual.screen import Screen

from trainfast_runner.errors import UserError
from trainfast_runner.records.state_words import state_words
from trainfast_tui.charts import data
from trainfast_tui.charts.column import Charts
from trainfast_tui.control.memory_view import Forecast, MemoryView
from trainfast_tui.control.next_run import NextRun, measured_memory
from trainfast_tui.live.snapshot import Snapshot
from trainfast_tui.screens.main_actions import MainActions
from trainfast_tui.text.endings import Ending, ending
from trainfast_tui.text.keys import bindings, of
from trainfast_tui.widgets.devices import DevicesPanel
from trainfast_tui.widgets.diagnosis_line import DiagnosisLine
from trainfast_tui.widgets.ending_panel import EndingPanel
from trainfast_tui.widgets.knob_panel import KnobPanel
from trainfast_tui.widgets.log_pane import LogPane
from trainfast_tui.widgets.memory_bar import MemoryBar
from trainfast_tui.widgets.step_panel import StepPanel
from trainfast_tui.widgets.strips import Footer, Header, StatusLine
from trainfast_tui.widgets.welcome import TooSmall, Welcome

if TYPE_CHECKING:
    from trainfast_runner.running.follower import RunSnapshot

LEAST_WIDTH, LEAST_HEIGHT = 80, 24
WIDE = 120
NARROW = 100
"""Below this width the step's figures take a line more."""


class MainScreen(MainActions, Screen[None]):
    """Shows the newest snapshot and the next run's knobs; its actions are in `MainActions`."""

    BINDINGS = [*bindings("main")]
    AUTO_FOCUS = "KnobPanel"
    DEFAULT_CSS = """
    MainScreen { layout: vertical; overflow: hidden; }
    #body { height: 1fr; }
    #middle { width: 1fr; height: 1fr; padding: 0 1 0 0; }
    #side { width: 32; height: 1fr; border-left: solid $panel; padding: 0 0 0 1; }
    #side:ansi { border-left: solid ansi_bright_black; }
    #side.-ascii { border-left: ascii $panel; }
    MainScreen.-wide #side { width: 48; }
    MainScreen.-small #body, MainScreen.-small DevicesPanel, MainScreen.-small LogPane { display: none; }
    MainScreen.-small TooSmall { display: block; }
    MainScreen.-narrow StepPanel { height: 6; }
    MainScreen.-narrow StepPanel.-watched { height: 7; }
    MainScreen.-no-steps StepPanel { display: none; }
    MainScreen.-first Charts, MainScreen.-first StepPanel { display: none; }
    """

    def __init__(self, *, ascii: bool = False) -> None:
        super().__init__()
        self.ascii = ascii
        self.snapshot: Snapshot | None = None
        self._is_composed = False
        self._followed: str | None = None
        self._memory: MemoryView | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the widgets are there; what threads have found may come before them, and on leaving after them."""
        return self._is_composed and self.app.is_running

    def compose(self) -> ComposeResult:
        # Before there are widgets: each of these would have all of them styled again.
        self._fit(self.app.size)
        plain = self.ascii
        yield Header(ascii=plain)
        yield DevicesPanel(ascii=plain)
        yield TooSmall(ascii=plain)
        with Horizontal(id="body"):
            with Vertical(id="middle"):
                yield Welcome(ascii=plain)
                yield EndingPanel(ascii=plain)
                yield Charts(ascii=plain)
                yield DiagnosisLine(ascii=plain)
                yield StepPanel(ascii=plain)
            with Vertical(id="side", classes="-ascii" if plain else ""):
                yield KnobPanel(ascii=plain)
                yield MemoryBar(ascii=plain)
        yield LogPane(ascii=plain)
        yield StatusLine(ascii=plain)
        yield Footer([*of("main"), *of("everywhere")], ascii=plain)

    def on_mount(self) -> None:
        self._is_composed = True
        self.show_knobs()
        self.on_screen_resume()

    def on_resize(self, event: events.Resize) -> None:
        self._fit(event.size)

    def _fit(self, size: Size) -> None:
        self.set_class(size.width < LEAST_WIDTH or size.height < LEAST_HEIGHT, "-small")
        self.set_class(size.width >= WIDE, "-wide")
        self.set_class(size.width < NARROW, "-narrow")

    def on_screen_resume(self) -> None:
        # Another screen was on top: what happened meanwhile is painted now.
        if self.trainfast.snapshot is not None:
            self.show_snapshot(self.trainfast.snapshot)

    def show_snapshot(self, snapshot: Snapshot) -> None:
        """Paint what is new."""
        if not self.is_ready:
            return
        self.snapshot = snapshot
        run = snapshot.run
        self.set_class(run is None and snapshot.looked, "-first")
        self.query_one(Welcome).set_class(run is None and snapshot.looked, "-shown")
        self.query_one(Header).show(run, snapshot.looked)
        self.query_one(TooSmall).show(run)
        used = data.used_uuids(run)
        live = run is not None and run.is_live
        self.query_one(DevicesPanel).show(snapshot.tick, used, live, snapshot.lost_s())
        self.query_one(EndingPanel).show(self._ending(run))
        self.query_one(Charts).show(snapshot)
        self.query_one(DiagnosisLine).show(run)
        self.query_one(StepPanel).show(run)
        self.set_class(run is not None and not run.is_live and not run.steps, "-no-steps")
        self.show_memory(self._memory)
        self.query_one(LogPane).show(run.log if run is not None else (), run is not None and not run.is_live)
        self._tell(snapshot)
        self.batch_if_wanted()
        self.drop_answered_question(run)

    def show_knobs(self) -> None:
        """Paint the next run's knobs."""
        next_run = self.next_run
        if next_run is None or not self.is_ready:
            return
        advice = next_run.advice(self.machine, self.trainfast.situation)
        self.query_one(KnobPanel).show(next_run, next_run.global_batch(self.machine), advice)
        self.query_one(Welcome).show(next_run.spec.name)
        self.show_memory(self._memory)

    def show_memory(self, foreseen: MemoryView | None) -> None:
        """Paint the next run's memory, and below it what the run on the screen took."""
        self._memory = foreseen
        if not self.is_ready:
            return
        measured = measured_memory(self.shown_run, self.next_run)
        if measured is not None:
            foreseen = replace(foreseen or MemoryView(), measured=measured)
        self.query_one(MemoryBar).show(foreseen)
        forecast = foreseen.forecast if foreseen is not None else None
        self.query_one(KnobPanel).show_chosen({} if forecast is None else {"attention": forecast.attention})

    def foreseen(self, next_run: NextRun) -> Forecast | None:
        """The forecast on the screen, where it is of this batch: one of other knobs may stand there for a moment."""
        found = self._memory.forecast if self._memory is not None else None
        return found if found is not None and found.batch_size == next_run.spec.knobs["batch_size"] else None

    def refuse(self, problem: UserError) -> None:
        """Say what cannot be done, at the knob it is about."""
        if not self.is_ready:
            return
        self.query_one(KnobPanel).refuse(problem)
        self.say(problem.line(), "error")

    def say(self, text: str, tone: str = "text") -> None:
        """A line for the status line."""
        if self.is_ready:
            self.query_one(StatusLine).say(text, tone)

    def show_pace(self, words: str) -> None:
        """How slow the terminal is."""
        self.query_one(Footer).show_pace(words)

    def current_ending(self) -> Ending | None:
        """What the middle of the screen says about the run's end."""
        return self._ending(self.shown_run)

    def _ending(self, run: RunSnapshot | None) -> Ending | None:
        if run is None:
            return None
        known = self.trainfast.explainer.about(run)
        return ending(run) if known is None else ending(run, known.explanation, known.left)

    @property
    def next_run(self) -> NextRun | None:
        return self.trainfast.next_run

    def _tell(self, snapshot: Snapshot) -> None:
        status = self.query_one(StatusLine)
        run = snapshot.run
        deadline = run.stop_deadline_ns if run is not None and run.is_live else None
        status.count_down(None if deadline is None else (deadline - snapshot.taken_ns) / 1e9)
        if snapshot.trouble is not None:
            status.say(snapshot.trouble, "error")
        # What was said of the run before, such as that it is being started, is over with the next one.
        key = f"{run.run_id} {run.state}" if run is not None else None
        if key != self._followed:
            self._followed = key
            if run is not None and snapshot.trouble is None:
                status.say(f"{run.run_id}: {run.reason or state_words(run.state)}", "muted")
