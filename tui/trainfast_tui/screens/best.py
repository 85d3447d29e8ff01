"""The screen on which a best-fit search is planned, started and continued; the search outlives the screen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from msgspec.structs import replace
from textual.app import ComposeResult

from trainfast_runner.errors import UserError
from trainfast_runner.records.search_states import UNFINISHED_STATES
from trainfast_runner.search.best.planning.request import BestRequest
from trainfast_runner.settings.knob_type import whole_number
from trainfast_runner.settings.knobs import defaults
from trainfast_tui.control.best_control import BestControl, BestOptions, BestPlanned, request_of
from trainfast_tui.control.instruction_choices import InstructionChoices, pin_choices, skip_choices
from trainfast_tui.control.messages import Notified
from trainfast_tui.control.threads import start_thread
from trainfast_tui.next_run.same_settings import has_same_model
from trainfast_tui.next_run.sources import next_run_from_search, spec_to_continue
from trainfast_tui.screens.base import PostedMessage
from trainfast_tui.screens.search import SearchScreen
from trainfast_tui.session import Session
from trainfast_tui.text.keys import ASK_BATCH, ASK_BUDGET, ASK_OBJECTIVE, ASK_VARY, RUN_KEY, key_of
from trainfast_tui.text.search.best_question import ABOUT_SCRIPT_SEARCH, ABOUT_SEARCH, START_HINT, best_question_rows
from trainfast_tui.text.search.best_state import candidate_knob_texts
from trainfast_tui.widgets.dialogs.ask import ask_choice
from trainfast_tui.widgets.dialogs.ask_best_question import QuestionDialogs
from trainfast_tui.widgets.search.best_view import BestView

if TYPE_CHECKING:
    from trainfast_runner.search.best.best_follower import BestSnapshot
    from trainfast_runner.settings.spec import RunSpec

NO_PLAN = 0
"""The `plan_id` before a plan was asked for."""
AFTER_RUN = -1
"""The `plan_id` of a plan that waits for the end of a live run."""
PLANNING_NOTICE = "Listing the settings that can run here…"
MAX_NAMED = 3
"""The status line names at most this many knobs."""
QUESTION_ACTIONS = (ASK_VARY, ASK_BATCH, ASK_OBJECTIVE, ASK_BUDGET, "fresh")
"""The actions that change the question of the next search."""


class BestScreen(SearchScreen["BestSnapshot"]):
    """Shows the live best-fit search, else the newest of the next run's model; Enter takes its best setting."""

    SCOPE = "best"

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._planned = BestPlanned(NO_PLAN, [])
        self._shows_new_question = False
        """True while a new question is on the screen in place of a search that has ended; `_search` is None then."""

    def compose(self) -> ComposeResult:
        yield BestView()
        yield self.footer()

    @property
    def search_control(self) -> BestControl:
        return self.session.searches.best

    @property
    def _is_asking(self) -> bool:
        """True while the screen asks whether to start a search: it shows none, and none is starting."""
        return self._search is None and not self.search_control.is_active

    def on_mount(self) -> None:
        self._show_search_or_plan()
        if self._is_asking:
            self._make_plan()

    def show_newest(self) -> None:
        self._show_search_or_plan()
        if self._planned.plan_id == AFTER_RUN and self._is_asking and self.session.live_run is None:
            self._make_plan()

    def _make_plan(self) -> None:
        """Plan a search of the next run, unless a run is being measured."""
        next_run, run = self.session.next_run, self.session.live_run
        assert next_run is not None
        if run is not None:
            words = f"{run.run_id} is using the device: {key_of('best', 'apply')} stops it first."
            self._planned = BestPlanned(AFTER_RUN, [(words, "warning")])
        else:
            plan_id = self.search_control.plan(next_run.spec, self.post)
            self._planned = BestPlanned(plan_id, [(PLANNING_NOTICE, "muted")])
        self._show_search_or_plan()

    def on_posted_message(self, message: PostedMessage) -> None:
        """Take in the plan; leave other messages to the app."""
        planned = message.content
        # The plan of an earlier question may come late.
        if isinstance(planned, BestPlanned) and planned.plan_id == self._planned.plan_id:
            self._planned = planned
            self._show_search_or_plan()

    def _show_search_or_plan(self) -> None:
        """Paint the search as of the newest snapshot, or the plan of one."""
        current = self.search_control.current
        if current is not None and current.is_live:
            self._shows_new_question = False
        search = self._search_to_show(current)
        self.keep_search(search)
        if search is not None:
            self.view.show_search(search, self._now_ns)
        else:
            self._show_plan()
        self.show_useful_keys()

    def _search_to_show(self, current: BestSnapshot | None) -> BestSnapshot | None:
        """Return the followed search.

        None if it has ended and trains another model, or if a new question is on the screen.
        """
        if current is None or current.is_live:
            return current
        if self._shows_new_question:
            return None
        question, next_run = current.so_far.question, self.session.next_run
        is_same_model = question is not None and next_run is not None and has_same_model(question, next_run.spec)
        return current if is_same_model or self._search is not None else None

    def _show_plan(self) -> None:
        next_run, control = self.session.next_run, self.search_control
        rows = [self.starting_row()]
        if self._is_asking:
            question = best_question_rows(control.request, self._planned.global_batch, fresh=control.options.is_fresh)
            is_script = next_run is not None and next_run.script is not None
            rows = [("", ABOUT_SCRIPT_SEARCH if is_script else ABOUT_SEARCH, "muted"), ("", START_HINT, "title")]
            rows += [(f"{name:<16}", value, "text") for name, value in question]
            rows += [("", text, tone) for text, tone in self._planned.texts]
        self.view.show_question(next_run.spec.name if next_run is not None else "", rows)

    def hidden_actions(self) -> set[str]:
        search = self._search
        is_live = search is not None and search.is_live
        can_take = search is not None and search.so_far.best is not None
        hidden: set[str] = set()
        if not (self._is_asking or can_take):
            hidden.add("apply")
        if not is_live:
            hidden |= {"pin", "skip"}
        if is_live or search is None:
            hidden.add("again")
        if not self._is_asking:
            hidden.update(QUESTION_ACTIONS)
        if not self.search_control.is_active:
            hidden.discard(ASK_VARY)  # beside an ended search the key asks a new question
        return hidden

    def action_labels(self) -> Mapping[str, str]:
        search = self._search
        is_unfinished = search is not None and search.state in UNFINISHED_STATES
        return {
            "apply": "start" if search is None else "take",
            ASK_VARY: "vary" if search is None else "new question",
            "again": "continue" if is_unfinished else "restart",
        }

    def show_refusal(self, error: UserError) -> None:
        super().show_refusal(error)
        if not self._planned.vary:
            # The plan was refused for the same reason, which the notice gives.
            self._planned = BestPlanned(self._planned.plan_id, [])
        self._show_search_or_plan()

    def action_leave(self) -> None:
        if self._is_asking:
            self.search_control.options = BestOptions()
        super().action_leave()

    def action_apply(self) -> None:
        search = self._search
        if search is None:
            self.start_search()
        elif search.so_far.best is None:
            self.notify("Nothing was measured yet.", severity="warning")
        else:
            self._apply_best(search, search.so_far.best.number)

    def _apply_best(self, search: BestSnapshot, best: int) -> None:
        """Give this candidate's knobs to the next run, which becomes one of the search's preset; close the screen."""
        session, question = self.session, search.so_far.question
        assert question is not None
        next_run = self.next_run_of(question)
        if next_run is None:
            return
        is_other_model = next_run is not session.next_run
        if is_other_model:
            next_run = session.set_next_run(next_run)
        knob_texts = [
            (name, text) for name, text in candidate_knob_texts(search.so_far, best) if next_run.text_of(name) != text
        ]
        if not knob_texts:
            session.post(Notified(f"The next run has the best setting already; {RUN_KEY} runs it"))
        elif not session.set_knobs(knob_texts):
            self.dismiss()
            return
        if is_other_model:
            words = f"The next run is now {question.name} with its search's best setting; {RUN_KEY} runs it"
            session.post(Notified(words))
        elif len(knob_texts) > MAX_NAMED:
            session.post(Notified(f"{len(knob_texts)} knobs have the values of the best setting; {RUN_KEY} runs it"))
        self.dismiss()

    def action_pin(self) -> None:
        self._ask_instruction("Pin a knob to one value from now on", pin_choices)

    def action_skip(self) -> None:
        self._ask_instruction("Never try a setting, or a value", skip_choices)

    def _ask_instruction(self, title: str, choices_of: Callable[[BestSnapshot], InstructionChoices]) -> None:
        """Let the person choose one of the instructions that the live search takes, and give it."""
        search = self._search
        if search is None or not search.is_live:
            self.show_notified(self.search_control.no_search_notice())
            return
        if search.so_far.space is None:
            self.notify("The settings are not listed yet.", severity="warning")
            return
        choices = choices_of(search)
        if not choices:
            self.notify("Your instructions leave one setting: there is nothing to choose.", severity="warning")
            return

        def give_chosen(name: str) -> None:
            start_thread("instruction", choices[name].give, self.session.post)

        ask_choice(self.app, title, [(name, choice.effect) for name, choice in choices.items()], give_chosen)

    def action_ask(self, part: str) -> None:
        """Ask for a part of the next search's question, and plan with the answer."""
        request, next_run = self._request_to_change(), self.session.next_run
        if request is not None:
            assert next_run is not None
            steps = whole_number({**defaults(), **next_run.spec.knobs}, "steps")
            QuestionDialogs(self.app, request, self._planned.vary, steps, self._plan_request).ask(part)

    def action_fresh(self) -> None:
        """Toggle whether the next search ignores earlier ones; after an answer, plan a fresh search of its question."""
        request, control = self._request_to_change(), self.search_control
        if request is None:
            return
        if self._search is None:
            control.options = BestOptions(request, not control.options.is_fresh)
            self._make_plan()
        else:
            self._plan_question(BestOptions(request, is_fresh=True))

    def _request_to_change(self) -> BestRequest | None:
        """Return the request of the shown search, else of the next one; None with a notice if a search is live."""
        control, search = self.search_control, self._search
        if control.is_active:
            words = f"The search is live; stop it with {key_of('best', 'cancel')} to ask another question."
            self.notify(words, severity="warning")
            return None
        if search is not None and search.so_far.question is not None:
            return request_of(search.so_far.question)
        return control.request

    def _plan_request(self, request: BestRequest) -> None:
        self._plan_question(replace(self.search_control.options, request=request))

    def _plan_question(self, options: BestOptions) -> None:
        """Show the plan of a search with these options, in place of a search that has ended."""
        self.search_control.options = options
        self._shows_new_question = True
        self.notify("")
        self._make_plan()

    def search_to_start(self) -> tuple[RunSpec, bool]:
        """Return the settings of the shown search, else of the question on the screen, and True to start it over.

        The request of the shown search becomes that of the next one. An unfinished search goes on. An ended one starts
        over, with the knobs of a next run of the same model. Only a question on the screen may be fresh. Raises
        UserError if the preset of the shown search is gone.
        """
        search, control, next_run = self._search, self.search_control, self.session.next_run
        assert next_run is not None
        spec = next_run.spec
        question = search.so_far.question if search is not None else None
        if search is not None and question is not None:
            if not has_same_model(question, spec):
                spec = next_run_from_search(question).spec
            control.options = replace(control.options, request=request_of(question))
            if search.state in UNFINISHED_STATES:
                spec = spec_to_continue(question, spec)
        return spec, search is None and control.options.is_fresh
