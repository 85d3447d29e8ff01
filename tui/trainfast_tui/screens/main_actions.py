"""What the keys of the main screen do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainfast_runner.errors import UserError
from trainfast_runner.records.state_words import state_words
from trainfast_runner.settings.knobs import BY_NAME
from trainfast_tui.charts.column import Charts
from trainfast_tui.control.memory_view import Forecast, swap_notice
from trainfast_tui.control.next_run import NextRun, of_preset
from trainfast_tui.live.snapshot import Snapshot
from trainfast_tui.screens.shared import ChartActions, OfTheApp
from trainfast_tui.widgets.knob_panel import KnobPanel
from trainfast_tui.widgets.log_pane import LogPane

if TYPE_CHECKING:
    from textual.screen import Screen

    from trainfast_runner.machine.devices import Machine
    from trainfast_runner.running.follower import RunSnapshot
    from trainfast_tui.text.endings import Ending

ENDED_WITH_ANSWER = ("answered", "nothing_fits")
"""States of a search that has said all it can say about its knobs."""


class MainActions(OfTheApp, ChartActions):
    """Mixed into the main screen, which has the widgets."""

    ascii: bool
    snapshot: Snapshot | None
    _question: tuple[Screen[object] | None, str] = None, ""
    """The dialog that asks about a live run, and that run's id."""
    _fix: tuple[str, NextRun, NextRun] | None = None
    """The run whose advice was taken last, and the next run before and after."""
    _batch_wanted = False
    """Whether a search was asked for before it was known whether one goes on."""

    if TYPE_CHECKING:

        def refuse(self, problem: UserError) -> None: ...
        def show_knobs(self) -> None: ...
        def foreseen(self, next_run: NextRun) -> Forecast | None: ...
        def current_ending(self) -> Ending | None: ...
        @property
        def next_run(self) -> NextRun | None: ...

    @property
    def machine(self) -> Machine | None:
        return self.trainfast.machine

    @property
    def shown_run(self) -> RunSnapshot | None:
        """The run on the screen."""
        return self.snapshot.run if self.snapshot is not None else None

    @property
    def panel(self) -> KnobPanel:
        return self.query_one(KnobPanel)

    def change(self, next_run: NextRun) -> None:
        """These are the next run's knobs from now on."""
        self.trainfast.next_run = next_run
        self.trainfast.touched = True
        self.trainfast.look_around()
        self.trainfast.foresee()
        self.show_knobs()

    def action_run(self) -> None:
        next_run, run = self.next_run, self.shown_run
        if next_run is None:
            self.say("There is no preset to run; p chooses one.", "warning")
            return
        if self.trainfast.control.is_starting:
            self.say("A run is being started already; r again when it is on the screen.", "warning")
            return
        if self.trainfast.searching.is_going_on:
            self.say("The search for the largest batch has the device; b shows it, Esc there cancels it.", "warning")
            return
        machine = None if self.machine is None else self.machine.used_by(next_run.spec.knobs["devices"])
        risk = swap_notice(self.foreseen(next_run), machine)
        if run is None or not run.is_live:
            if risk:
                from trainfast_tui.screens.dialogs import Confirm

                question = f"{risk} Start {next_run.spec.name} all the same?"
                self.app.push_screen(Confirm(question, "start it", ascii=self.ascii), partial(self._start, next_run))
            else:
                self._start(next_run, True)
            return
        done = run.steps[-1].step if run.steps else 0
        question = f"{run.run_id} is {state_words(run.state)}, at step {done}. Stop it and start {next_run.spec.name}?"
        question = " ".join(filter(None, (question, risk)))
        self._ask_about(run, question, "stop it, then run", partial(self._stop_then_run, run.directory, next_run))

    def _start(self, next_run: NextRun, yes: object) -> None:
        if not yes:
            return
        self.say(f"Starting {next_run.spec.name}…")
        self.trainfast.control.start(next_run.spec)
        self.trainfast.foresee()

    def action_batch(self) -> None:
        next_run, run = self.next_run, self.shown_run
        self._batch_wanted = self.snapshot is None
        if self._batch_wanted:
            self.say("Looking whether a search goes on…")
        elif self.trainfast.searching.is_going_on or self._is_answered():
            self._open_search()
        elif next_run is None:
            self.say("There is no preset to search a batch for; p chooses one.", "warning")
        elif self.trainfast.control.is_starting:
            self.say("A run is being started; b again when it is on the screen.", "warning")
        elif run is None or not run.is_live:
            self._search(None, True)
        else:
            from trainfast_tui.text.batch_search import limit_notice

            question = f"{run.run_id} is {state_words(run.state)} and has the device. Stop it and search the batch?"
            question = " ".join(filter(None, (question, limit_notice(next_run.spec, self.machine))))
            self._ask_about(run, question, "stop it, then search", partial(self._search, run.directory))

    def batch_if_wanted(self) -> None:
        """Now that it is known what goes on, what was asked for before."""
        if self._batch_wanted:
            self.action_batch()

    def _is_answered(self) -> bool:
        """Whether the search that was followed last is about the knobs as they stand."""
        search, next_run = self.trainfast.searching.current, self.next_run
        if search is None or next_run is None or search.state not in ENDED_WITH_ANSWER:
            return False
        from trainfast_tui.control.next_run import is_about

        return is_about(search, next_run.spec)

    def _search(self, live: Path | None, yes: object) -> None:
        if not yes or self.next_run is None:
            return
        first = None if live is None else partial(self.trainfast.control.end, live)
        cool_to_c = self.trainfast.control.cool_to_c
        self.trainfast.searching.start(self.next_run.spec, cool_to_c=cool_to_c, first=first)
        self.trainfast.foresee()
        self._open_search()

    def _open_search(self) -> None:
        from trainfast_tui.screens.search import open_search

        if self.next_run is not None:
            open_search(self.trainfast, self.next_run.spec)

    def apply(self, settings: Iterable[tuple[str, str]], next_run: NextRun | None = None) -> None:
        """Give the knobs of `next_run`, else of the next run as it stands, these values, as they are typed."""
        next_run = next_run or self.next_run
        if next_run is None:
            return
        settings = tuple(settings)
        try:
            for name, value in settings:
                next_run = next_run.type(name, value)
        except UserError as problem:
            self.refuse(problem)
            return
        self.change(next_run)
        self.panel.move_to(settings[0][0])
        self.say(f"{', '.join(f'{name} = {value}' for name, value in settings)}; r runs it")

    def _ask_about(self, run: RunSnapshot, question: str, yes: str, then: Callable[[object], None]) -> None:
        """Ask what makes sense only while this run lives."""
        from trainfast_tui.screens.dialogs import Confirm

        self._question = Confirm(question, yes, ascii=self.ascii), run.run_id
        self.app.push_screen(self._question[0], then)

    def drop_answered_question(self, run: RunSnapshot | None) -> None:
        """Close the question about a run that has ended by itself, and say so."""
        dialog, run_id = self._question
        if run is None or run.is_live or run.run_id != run_id or self.app.screen is not dialog:
            return
        self._question = None, ""
        dialog.dismiss(None)
        self.say(f"{run_id} has ended by itself: {state_words(run.state)}. r starts the next run.", "warning")

    def _stop_then_run(self, directory: Any, next_run: NextRun, yes: object) -> None:
        if yes:
            self.say(f"Stopping {directory.name}, then starting {next_run.spec.name}…")
            self.trainfast.control.stop_then_start(directory, next_run.spec)

    def action_stop(self) -> None:
        run = self.shown_run
        if self.trainfast.control.is_cooling:
            self.trainfast.control.give_up()
            return
        if run is None or not run.is_live:
            self.say("Nothing is running.")
            return
        if run.state == "stopping" or run.stop_deadline_ns is not None:
            question = f"Kill {run.run_id} now? What it has not written yet is lost; its records so far are kept."
            self._ask_about(run, question, "kill it", partial(self._kill, run.directory))
        elif run.supervised:
            self.say("Asking it to stop…")
            self.trainfast.control.stop(run.directory)
        else:
            question = f"{run.run_id} has no supervisor any more. Stop its processes and clean up?"
            self._ask_about(run, question, "stop them", partial(self._clean_up, run.directory))

    def _kill(self, directory: Any, yes: object) -> None:
        if yes:
            self.trainfast.control.kill(directory)

    def _clean_up(self, directory: Any, yes: object) -> None:
        if yes:
            self.say("Stopping its processes; SIGKILL after 30 s…")
            self.trainfast.control.stop(directory)

    def action_move(self, by: int) -> None:
        self.panel.move(by)

    def action_turn(self, by: int, around: bool = False) -> None:
        if self.next_run is None:
            return
        try:
            self.change(self.next_run.turn(self.panel.current, by, around=around))
        except UserError as problem:
            self.refuse(problem)

    def action_cycle(self) -> None:
        self.action_turn(1, True)

    def action_reset_knob(self) -> None:
        if self.next_run is not None:
            self.change(self.next_run.reset(self.panel.current))

    def action_fix(self, place: int) -> None:
        ending, run = self.current_ending(), self.shown_run
        if ending is None or place >= len(ending.fixes) or self.next_run is None or run is None:
            return
        before = self._without_the_last_fix(self.next_run, run.run_id)
        self.apply(ending.fixes[place].settings.items(), before)
        self._fix = run.run_id, before, self.next_run

    def _without_the_last_fix(self, next_run: NextRun, run_id: str) -> NextRun:
        """One change was enough: another one is instead of it. Knobs turned since then stay as they are."""
        if self._fix is None or self._fix[0] != run_id:
            return next_run
        _, before, after = self._fix
        for name, value in after.spec.knobs.items():
            if value != before.spec.knobs[name] and next_run.spec.knobs[name] == value:
                next_run = next_run.back(name, before)
        return next_run

    def action_type_value(self) -> None:
        if self.next_run is None:
            return
        from trainfast_tui.screens.dialogs import Ask

        entry = BY_NAME[self.panel.current]
        self.app.push_screen(
            Ask(entry.name, entry.values.describe(), self.next_run.shown(entry.name), entry.read, ascii=self.ascii),
            partial(self._typed, entry.name),
        )

    def _typed(self, name: str, text: object) -> None:
        if isinstance(text, str) and self.next_run is not None:
            self.change(self.next_run.type(name, text))

    def action_preset(self) -> None:
        from trainfast_tui.control.preset_list import choices
        from trainfast_tui.screens.dialogs import Pick

        current = self.next_run.spec.name if self.next_run is not None else None
        self.app.push_screen(Pick("What to train", choices(), current, ascii=self.ascii), self._picked)

    def _picked(self, name: object) -> None:
        if not isinstance(name, str):
            return
        try:
            chosen = of_preset(name)
        except UserError as problem:
            self.refuse(problem)
            return
        before = self.next_run.before if self.next_run is not None else None
        self.change(chosen.compared_with(before))
        self.say(f"{chosen.spec.name}: {chosen.spec.title}")

    def action_save(self) -> None:
        next_run = self.next_run
        if next_run is None:
            return
        from trainfast_runner.settings.saving import save_preset
        from trainfast_tui.screens.dialogs import Ask

        def save(name: str) -> None:
            # Refused names and a full disk are said in the dialog, which stays open.
            try:
                self.say(f"saved: {save_preset(name, next_run.spec)}")
            except OSError as error:
                raise UserError(f"not saved: {error}", key="name") from None

        hint = "A name; it becomes a file of your own presets, with the comments of the preset it comes from."
        self.app.push_screen(Ask("Save these knobs as", hint, "", save, ascii=self.ascii))

    def action_cool_to(self) -> None:
        from trainfast_runner.machine.cooling import HIGHEST_C, LOWEST_C
        from trainfast_tui.screens.dialogs import Ask

        control = self.trainfast.control
        allowed = f"{LOWEST_C:g} to {HIGHEST_C:g} degrees Celsius"
        hint = (
            f"{allowed}: each run, and each process of a search, waits until its GPUs are below it, so that all begin"
            " alike. Empty: no wait."
        )

        def take(text: str) -> None:
            control.cool_to_c = _degrees(text, LOWEST_C, HIGHEST_C)
            wait = control.cool_to_c
            self.say("Runs start at once." if wait is None else f"Each run waits until its GPUs are below {wait:g} °C.")

        now = "" if control.cool_to_c is None else f"{control.cool_to_c:g}"
        self.app.push_screen(Ask("Start runs below", hint, now, take, ascii=self.ascii))

    def action_compare(self) -> None:
        run = self.shown_run
        if run is None:
            self.say("Nothing to compare yet; r starts a run.")
        elif run.result is None:
            self.say("This run has not ended yet; compare when it has.")
        else:
            self.trainfast.compare_with_previous(run.run_id)

    def action_history(self) -> None:
        from trainfast_tui.screens.runs import RunsScreen

        self.app.push_screen(RunsScreen(self.trainfast.home, ascii=self.ascii))

    def action_monitor(self) -> None:
        from trainfast_tui.screens.monitor import MonitorScreen

        self.app.push_screen(MonitorScreen(ascii=self.ascii))

    def action_topo(self) -> None:
        from trainfast_tui.screens.topo import TopoScreen

        self.app.push_screen(TopoScreen(ascii=self.ascii))

    def action_diagnosis(self) -> None:
        run = self.shown_run
        if run is None or not run.steps:
            self.say("No step was measured yet, so nothing can be told.")
            return
        from trainfast_tui.screens.diagnosis import DiagnosisScreen

        self.app.push_screen(DiagnosisScreen(run, ascii=self.ascii))

    def action_log(self) -> None:
        self.query_one(LogPane).toggle_class("-open")

    def action_log_scroll(self, by: int) -> None:
        log = self.query_one(LogPane)
        if log.display:
            log.scroll_pages(by)
        else:
            self.panel.move(by * 8)

    def action_rate(self) -> None:
        self.query_one(Charts).turn_rate()


def _degrees(text: str, lowest: float, highest: float) -> float | None:
    """The temperature that was typed; None for none."""
    text = text.strip().removesuffix("C").removesuffix("°").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not lowest <= value <= highest:
        raise UserError(
            f"{text} is no temperature to wait for",
            key="cool to",
            allowed=[f"{lowest:g} to {highest:g} degrees Celsius"],
        )
    return value
