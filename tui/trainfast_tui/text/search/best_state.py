"""A live best-fit search in words: its state, its instructions, the best so far, the chance of a better one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainfast_runner.search.best.person_instructions import UNPIN
from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_runner.units import chance_text, counted
from trainfast_tui.text import format as fmt
from trainfast_tui.text.keys import ASK_BUDGET, ASK_VARY, key_of
from trainfast_tui.text.search.best_figures import (
    budget_words,
    gain_text,
    is_final,
    noise_words,
    objective_words,
    typed_knobs,
)
from trainfast_tui.text.search.outcomes import role_of
from trainfast_tui.text.wait_words import wait_words

if TYPE_CHECKING:
    from trainfast_runner.search.best.best_follower import BestSnapshot
    from trainfast_runner.search.best.best_so_far import BestSoFar
    from trainfast_runner.search.journal.best import Instruction, Space

CONTINUE_WORDS = f"{key_of('best', 'again')} continues"
VOID_CAUSES = {"other_processes": "machine busy: ", "heat": "GPU too hot: ", "power_brake": "GPU braked: "}
"""Words before the number of void settings, by the kind of doubt that voided most."""
VARY_KEY, LEAVE_KEY = key_of("best", ASK_VARY), key_of("best", "leave")


def candidate_words(space: Space, number: int, *, short: bool = False) -> str:
    """Return a candidate as the knobs in which it differs from the baseline.

    With `short` the accumulation is left out where it follows from the batch at one global batch.
    """
    candidate, baseline = space.candidates[number], space.candidates[space.baseline_number]
    overrides = {name: value for name, value in candidate.knobs.items() if value != baseline.knobs.get(name)}
    if short and "batch_size" in overrides and candidate.samples_per_step == baseline.samples_per_step:
        overrides.pop("grad_accum", None)
    return typed_knobs(overrides) or "the baseline"


def best_search_words(search: BestSnapshot) -> str:
    """Return the state of the search, or its end, in one line."""
    so_far = search.so_far
    waiting = wait_words(so_far.waits_for)
    if waiting and search.state in ("running", "starting"):
        return waiting
    if search.state == "running":
        return doing_words(so_far)
    words = {
        "starting": "starting: the model is built, and the settings are listed with their memory",
        "pausing": "pausing after this step",
        "paused": "paused: no process is running",
        "interrupted": f"interrupted: no process works on it; {CONTINUE_WORDS}",
    }
    return _end_words(search) or words.get(search.state, search.state)


def _end_words(search: BestSnapshot) -> str:
    """Return the answer, or the reason there is none; empty for a search that goes on."""
    from trainfast_runner.search.journal.lines import CANCELLED_REASON

    ended = search.so_far.ended
    if ended is None:
        return ""
    if search.state == "answered" and ended.answer is not None:
        return _answer_words(search.so_far)
    if search.state == "nothing_fits":
        missing = f": the smallest is {fmt.size(ended.missing_bytes)} too large" if ended.missing_bytes else ""
        return f"no setting fits{missing}; {VARY_KEY} varies other knobs, {LEAVE_KEY} goes back to turn some"
    if search.state == "failed":
        return f"failed: {fmt.plain(ended.reason)}; {VARY_KEY} asks a new question, {LEAVE_KEY} goes back to the knobs"
    if search.state == "cancelled":
        reason_words = "" if ended.reason in ("", CANCELLED_REASON) else f": {fmt.plain(ended.reason)}"
        return f"stopped{reason_words}; its journal is kept, {CONTINUE_WORDS}"
    return ""


def is_doubtful(search: BestSnapshot) -> bool:
    """True for an answer that is not final, or whose figures are in doubt."""
    answer = search.so_far.answer
    if search.state != "answered" or answer is None:
        return False
    return not is_final(answer, search.state) or bool(search.so_far.answer_doubts)


def doing_words(so_far: BestSoFar) -> str:
    """Return the step under way and its candidate in words."""
    step, space = so_far.newest_step, so_far.space
    if step is None or step.candidate_number is None or space is None or not so_far.is_under_way:
        return "deciding the next step"
    knob = f" {step.knob} of" if step.knob else ""
    return f"{role_of(step.action).doing}{knob} {candidate_words(space, step.candidate_number)}"


def _answer_words(so_far: BestSoFar) -> str:
    answer = so_far.ended.answer if so_far.ended is not None else None
    assert answer is not None
    assert so_far.space is not None
    tried_count = answer.tried_in_budget
    budget = "" if tried_count is None else f"{_unfinished_words(so_far, tried_count)}; "
    if answer.within_percent is not None:
        return f"{budget}no winner: {noise_words(answer.within_percent)}"
    if answer.best_number == so_far.space.baseline_number and tried_count is None:
        return "the baseline itself is the fastest"
    if tried_count is not None:
        budget += "best so far: "
    words = candidate_words(so_far.space, answer.best_number)
    if (gain := answer.gain_percent) is not None and answer.best_number != so_far.space.baseline_number:
        words += f": {gain_text(gain)}"
    return budget + words


def _unfinished_words(so_far: BestSoFar, tried_count: int) -> str:
    """Return why the budget did not pay for every setting: what was void, else their number, and the key for more."""
    measured = {line.candidate_number for line in so_far.attempts if line.outcome != "void"}
    void = [line for line in so_far.trials if line.outcome == "void"]
    void_numbers = {line.candidate_number for line in void} - measured
    kinds = [doubt.kind for line in void for doubt in line.doubts if doubt.kind in VOID_CAUSES]
    words = VOID_CAUSES[max(kinds, key=kinds.count)] if kinds else ""
    if void_numbers:
        words += f"{len(void_numbers)} of {counted(len(void_numbers | measured), 'setting')} void"
    else:
        words += f"{len(void)} of {counted(len(so_far.trials), 'trial')} void, " if void else ""
        words += budget_words(tried_count, len(so_far.candidates))
    return f"{words}; {key_of('best', ASK_BUDGET)} adds time"


def instruction_words(instruction: Instruction, space: Space | None) -> str:
    """Return an instruction in words: `pin precision=bf16`, `unpin precision`, `skip the setting batch_size=8`."""
    do, name, number = instruction.do, instruction.knob, instruction.candidate_number
    if number is not None:
        is_listed = space is not None and 0 <= number < len(space.candidates)
        return f"{do} the setting {candidate_words(space, number) if space is not None and is_listed else number}"
    return f"{do} {name}" if do == UNPIN else f"{do} {typed_knobs({name: instruction.value})}"


def best_words(so_far: BestSoFar) -> str:
    """Return the objective of the best setting so far with its 95 % interval; empty before anything was measured."""
    return "" if so_far.best is None else objective_words(so_far.objective, so_far.for_steps, so_far.best.value)


def chance_words(so_far: BestSoFar) -> str:
    """Return the chance that going on finds 2 % more, and its price; empty before two settings were measured.

    With one measurement both are assumptions. A price beyond the budget is never paid.
    """
    step, question = so_far.newest_step, so_far.question
    measured = {so_far.attempts[index].candidate_number for index in so_far.rates}
    if step is None or step.chance is None or step.action != "trial" or len(measured) < 2:
        return ""
    price = "" if step.price_s is None else f", for about {fmt.duration(step.price_s)}"
    if step.price_s is not None and question is not None and step.price_s > question.budget_s - so_far.spent_s():
        price = f", but that takes {fmt.duration(step.price_s)}, beyond the budget"
    return f"{chance_text(step.chance)} chance that going on finds 2 % more{price}"


def candidate_knob_texts(so_far: BestSoFar, number: int) -> tuple[tuple[str, str], ...]:
    """Return names and values of a candidate's knobs as they are typed."""
    return tuple((name, KNOBS_BY_NAME[name].text_of(value)) for name, value in so_far.candidates[number].knobs.items())
