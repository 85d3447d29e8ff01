"""The main screen: devices, charts, the run's figures, and the knobs of the next run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from textual import events
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.geometry import Size

from trainfast_runner.errors import UserError
from trainfast_runner.records.run_directory import notable_reason, state_text
from trainfast_runner.units import counted
from trainfast_tui.charts.chart_column import ChartColumn
from trainfast_tui.live.snapshot import SearchKind, Snapshot
from trainfast_tui.next_run.next_run import NextRun
from trainfast_tui.painting import ListWidget
from trainfast_tui.panels.ask import ask_yes
from trainfast_tui.panels.devices import DevicesPanel
from trainfast_tui.panels.ending_panel import EndingPanel
from trainfast_tui.panels.header_footer import FilterLine, Footer, Header, StatusLine
from trainfast_tui.panels.knob_panel import KnobPanel
from trainfast_tui.panels.memory_and_speed import Predictions
from trainfast_tui.panels.step_panel import DiagnosisLine, StepPanel
from trainfast_tui.panels.welcome import MIN_HEIGHT, MIN_WIDTH, TooSmall, Welcome
from trainfast_tui.screens.base import AppScreen
from trainfast_tui.text.format import Line, clamp_scroll, rule, with_sizes
from trainfast_tui.text.keys import PRESET_KEY, RUN_KEY, STOP_KEY, key_of
from trainfast_tui.text.memory_words import swap_notice

if TYPE_CHECKING:
    from trainfast_runner.running.follower import RunSnapshot

WIDE_SIDE_FROM = 120
"""Columns from which the knobs have a wide column."""
LOW_STEP_PANEL_FROM = 140
"""Columns from which the step panel needs one line less."""
RUNS_TO_COMPLETION = "{} runs to completion and writes its usual files; set the knob steps to end it sooner."


class MainScreen(AppScreen):
    """Shows the newest snapshot and the next run's knobs; starts and stops runs, and opens the other screens."""

    SCOPE = "main"
    OPENS_COMPARISONS = True
    AUTO_FOCUS = "KnobPanel"

    _is_composed = False
    _status_of_run: str | None = None
    """Id and state of the run that the status line is about."""
    _trouble: str | None = None
    """The reading error that was shown last; None without one."""

    @property
    def is_ready(self) -> bool:
        """True while the widgets exist: messages of threads may come earlier, and on leaving later."""
        return self._is_composed and self.app.is_running

    def content(self) -> ComposeResult:
        # Set the size classes before the widgets exist: a later change styles every widget again.
        self._fit(self.app.size)
        yield Header()
        yield DevicesPanel()
        yield TooSmall()
        with Horizontal(id="body"):
            with Vertical(id="middle"):
                yield Welcome()
                yield EndingPanel(self.session)
                yield ChartColumn()
                yield DiagnosisLine()
                yield StepPanel()
            with Vertical(id="side"):
                yield KnobPanel(self.session)
                yield Predictions()
        yield LogPane()

    def on_mount(self) -> None:
        self._is_composed = True
        self.show_next_run()
        if self.session.refusal is not None:
            self.show_refusal(self.session.refusal)

    def on_resize(self, event: events.Resize) -> None:
        self._fit(event.size)

    def _fit(self, size: Size) -> None:
        self.set_class(size.width < MIN_WIDTH or size.height < MIN_HEIGHT, "-small")
        self.set_class(size.width >= WIDE_SIDE_FROM, "-wide")
        self.set_class(size.width < LOW_STEP_PANEL_FROM, "-narrow")

    def on_screen_suspend(self) -> None:
        self.session.background.is_shown = False

    def on_screen_resume(self, event: events.ScreenResume) -> None:
        self.session.background.is_shown = True
        event.refresh_styles = False  # they are new, or another screen was on top: only the snapshot is newer
        if self.session.snapshot is not None:
            self.show_snapshot(self.session.snapshot)

    def show_snapshot(self, snapshot: Snapshot) -> None:
        """Paint the changes since the snapshot before."""
        if not self.is_ready:
            return
        run = snapshot.run
        self.set_class(run is None and snapshot.has_read_home, "-first")
        self.query_one(Welcome).set_class(run is None and snapshot.has_read_home, "-shown")
        self.query_one(Header).show_run(run, snapshot.has_read_home)
        self.query_one(TooSmall).show_run(run)
        self.query_one(DevicesPanel).show_snapshot(snapshot)
        self.query_one(EndingPanel).show_run(run)
        self.query_one(ChartColumn).show_snapshot(snapshot)
        self.query_one(DiagnosisLine).show_run(run)
        self.query_one(StepPanel).show_run(run)
        self.set_class(run is not None and not run.is_live and not run.steps, "-no-steps")
        self.show_predictions()
        self.query_one(LogPane).show_run(run)
        self._show_status(snapshot)
        useless = set() if run is not None else {"export", "report"}
        self.query_one(Footer).set_actions(useless if self.session.is_device_used else {*useless, "stop"}, {})

    def show_next_run(self, knob: str = "") -> None:
        """Paint the next run's knobs, with the cursor on `knob` where one is named."""
        next_run = self.session.next_run
        if next_run is None or not self.is_ready:
            return
        self.query_one(KnobPanel).show_knobs(knob)
        name = next_run.spec.name
        self.query_one(Welcome).show_effect_of_r(
            f"train {name} for a few seconds" if next_run.script is None else f"run {name}, a script of your own"
        )
        self.show_predictions()

    def show_predictions(self) -> None:
        """Paint the next run's predicted memory and speed."""
        if not self.is_ready:
            return
        memory, speed = self.session.background.memory, self.session.background.speed
        self.query_one(Predictions).show_predictions(memory, speed)
        fit = memory.fit if memory is not None else None
        self.query_one(KnobPanel).show_auto_choices({} if fit is None else {"attention": fit.predicted.attention})

    def show_refusal(self, error: UserError) -> None:
        if self.is_ready:
            self.query_one(KnobPanel).show_refusal(error)

    def _show_status(self, snapshot: Snapshot) -> None:
        status, run = self.query_one(StatusLine), snapshot.run
        deadline = snapshot.live_run.stop_deadline_ns if snapshot.live_run is not None else None
        status.count_down(None if deadline is None else (deadline - snapshot.taken_ns) / 1e9)
        if snapshot.trouble != self._trouble:
            shown, self._trouble = self._trouble, snapshot.trouble
            if snapshot.trouble is not None:
                status.show_text(snapshot.trouble, "error")
            elif status.text == shown:
                status.show_text("")
        # A notice about the run before, such as its start, is outdated with the next run.
        key = f"{run.run_id} {run.state}" if run is not None else None
        if key != self._status_of_run and snapshot.trouble is None:
            self._status_of_run = key
            reason = "" if run is None else with_sizes(notable_reason(run.state, run.reason))
            # The header has the state.
            status.show_text(f"{self.session.run_words(run.run_id)}: {reason}" if run and reason else "", "muted")

    def action_run(self) -> None:
        session, next_run, run = self.session, self.session.next_run, self.session.live_run
        if next_run is None:
            self.notify(f"There is no preset to run; {PRESET_KEY} chooses one.", severity="warning")
        elif session.run_control.pending.is_pending:
            self.notify(f"A run is starting; press {RUN_KEY} again once it is on the screen.", severity="warning")
        elif session.searches.running_kind is not None:
            self._notify_device_used(session.searches.running_kind)
        else:
            risk, name = self._risk(next_run), next_run.spec.name
            if run is not None:
                steps_done = run.steps[-1].step if run.steps else 0
                label = self.session.run_words(run.run_id)
                question = f"{label} is {state_text(run.state)}, at step {steps_done:,}. Stop it and start {name}?"
                question = " ".join(filter(None, (question, risk)))
                start = partial(self._start, next_run, run_to_stop=run.directory)
                ask_yes(self.app, question, "stop it, then run", start)
            elif risk:
                question = f"{risk} Start {name} all the same?"
                ask_yes(self.app, question, "start it", partial(self._start, next_run))
            else:
                self._start(next_run)

    def _risk(self, next_run: NextRun) -> str:
        """Warn of a run that may do more than train for seconds; empty for any other."""
        if next_run.script is not None:
            return "" if "steps" in next_run.spec.knobs else RUNS_TO_COMPLETION.format(next_run.spec.title)
        machine = self.session.machine
        used_machine = None if machine is None else machine.used_by(next_run.spec.knobs["devices"])
        return swap_notice(self.session.background.fit(next_run, machine), used_machine)

    def _start(self, next_run: NextRun, run_to_stop: Path | None = None) -> None:
        name = next_run.spec.name
        before = "" if run_to_stop is None else f"Stopping {self.session.run_words(run_to_stop.name)}, then "
        self.notify(f"{before}{'starting' if before else 'Starting'} {name}…")
        self.session.start_run(next_run, run_to_stop)

    def action_batch(self) -> None:
        self._open_search(SearchKind.BATCH)

    def action_best(self) -> None:
        self._open_search(SearchKind.BEST)

    def _open_search(self, kind: SearchKind) -> None:
        """Open the screen of a search, if a snapshot has told whether one is live."""
        session = self.session
        self.notify("")  # a notice that named this key
        if session.snapshot is None:
            self.notify(f"Looking for a live search; press {kind.key} again.")
        elif (running_kind := session.searches.running_kind) is not None and running_kind is not kind:
            self._notify_device_used(running_kind)
        elif session.next_run is None:
            self.notify(f"There is no preset to search; {PRESET_KEY} chooses one.", severity="warning")
        elif kind is SearchKind.BATCH:
            from trainfast_tui.screens.batch import BatchScreen

            self.app.push_screen(BatchScreen(session, session.next_run))
        else:
            from trainfast_tui.screens.best import BestScreen

            self.app.push_screen(BestScreen(session, session.next_run))

    def _notify_device_used(self, kind: SearchKind) -> None:
        """Show that this search uses the device, and how to stop it."""
        keys = f"{kind.key} shows it, {key_of(kind, 'cancel')} there stops it"
        self.notify(f"{kind.label.capitalize()} search is using the device; {keys}.", severity="warning")

    def action_stop(self) -> None:
        run, run_control = self.session.live_run, self.session.run_control
        search_kind = self.session.searches.running_kind
        if run_control.is_waiting:
            run_control.give_up()
        elif search_kind is not None:
            self._notify_device_used(search_kind)
        elif run is None and run_control.pending.is_pending:
            self.notify(f"The run is starting; press {STOP_KEY} again once it is on the screen.", severity="warning")
        elif run is None:
            self.notify("Nothing is running.")
        elif run.state == "stopping" or run.stop_deadline_ns is not None:
            self.notify(f"Killing {self.session.run_words(run.run_id)}…", severity="warning")
            run_control.stop(run.directory, at_once=True)
        elif run.supervised:
            self.notify("Asking the run to stop…")
            run_control.stop(run.directory)
        else:
            label = self.session.run_words(run.run_id)
            question = f"{label} has no supervisor any more. Stop its processes and clean up?"
            ask_yes(self.app, question, "stop them", partial(self._clean_up, run.directory))

    def _clean_up(self, directory: Path) -> None:
        from trainfast_runner.running.present_state import STOP_GRACE_S

        self.notify(f"Stopping the run's processes; SIGKILL after {STOP_GRACE_S:.0f} s…")
        self.session.run_control.stop(directory)

    def action_compare(self) -> None:
        run = self.session.shown_run
        if run is None:
            self.notify(f"Nothing to compare yet; {RUN_KEY} starts a run.")
        elif run.result is None:
            key = key_of("main", "compare")
            being_written = f"The result of this run is being written; press {key} again."
            self.notify(f"This run has not ended; press {key} again when it has." if run.is_live else being_written)
        else:
            self.session.compare_with_previous(run.run_id)

    def action_history(self) -> None:
        from trainfast_tui.screens.runs import RunsScreen

        self.app.push_screen(RunsScreen(self.session))

    def action_monitor(self) -> None:
        from trainfast_tui.screens.monitor import MonitorScreen

        self.app.push_screen(MonitorScreen(self.session))

    def action_topo(self) -> None:
        from trainfast_tui.screens.monitor import TopoScreen

        self.app.push_screen(TopoScreen(self.session))

    def action_script(self) -> None:
        from trainfast_tui.screens.script import ScriptScreen

        screen = ScriptScreen(self.session)
        self.app.push_screen(screen)
        # At once, so that keys typed ahead come to the dialog.
        screen.action_command()

    def action_diagnosis(self) -> None:
        run = self.session.shown_run
        if run is None or not run.steps:
            self.notify("No step was measured yet: the bottleneck is unknown.")
            return
        from trainfast_tui.screens.compare import DiagnosisScreen

        self.app.push_screen(DiagnosisScreen(self.session, run))

    def answer_run_id(self) -> str | None:
        return None if self.session.shown_run is None else self.session.shown_run.run_id

    def filter_rows(self, words: str) -> None:
        panel = self.query_one(KnobPanel)
        panel.filter_knobs(words)
        self.query_one(FilterLine).show_count(counted(len(panel.listed), "knob"))

    def action_back(self) -> None:
        self.app.exit(0)

    def action_page(self, by: int) -> None:
        """Scroll the log by pages while it is open, else move the cursor among the knobs."""
        log = self.query_one(LogPane)
        if log.display:
            log.action_page(by)
        else:
            self.query_one(KnobPanel).action_page(by)

    def action_knob_help(self) -> None:
        from trainfast_tui.screens.help import HelpScreen

        panel = self.query_one(KnobPanel)
        self.app.push_screen(HelpScreen(self.session, lambda width: [panel.about(width)]))


class LogPane(ListWidget):
    """The last lines of the training's output; it scrolls by pages."""

    DEFAULT_CLASSES = "-empty"

    _run_id: str | None = None
    _output: tuple[str, ...] = ()
    _lines_back = 0

    def show_run(self, run: RunSnapshot | None) -> None:
        """Show the log of this run; while a person reads earlier lines, those of the same run stay as they are."""
        run_id, output = (None, ()) if run is None else (run.run_id, run.log)
        if run_id != self._run_id:
            self._run_id, self._lines_back = run_id, 0
        if not self._lines_back and output is not self._output:
            self._output = output
            self.set_class(not output, "-empty")
            if self.display:
                self.repaint()

    def action_log(self) -> None:
        """Show or hide the log, with its newest lines."""
        self._lines_back = 0
        self.toggle_class("-open")

    def action_move(self, by: int) -> None:
        """Scroll to newer (1) or older (-1) lines."""
        self._lines_back = clamp_scroll(self._lines_back - by, len(self._output), self.page_rows)
        self.repaint()

    def lines(self, width: int, height: int) -> list[Line]:
        room = height - 1
        self._lines_back = clamp_scroll(self._lines_back, len(self._output), room)
        end = len(self._output) - self._lines_back
        visible_lines = self._output[max(0, end - room) : end]
        title = "log" if not self._lines_back else f"log, {self._lines_back} lines back"
        body: list[Line] = [[(line, "text")] for line in visible_lines]
        return [rule(title, width), *(body or [[("Nothing was printed.", "muted")]])]
