"""Whole best-fit searches of synthetic spaces, replayed under a fake clock."""

import re
from collections import Counter

import pytest
from benchmarks.best_fit import launch_bound_rows
from benchmarks.best_fit_replay import FakeConductor, replay
from benchmarks.best_fit_spaces import Synthetic, regret

from trainfast_runner.search.best_journal import Space, Trial

from .synthetic import asking

REASON_OF_A_LEVER = "checkpointing=full saves memory alone, and checkpointing=off is not too large"
SHARES = (0.2, 0.5, 0.8, 0.95)
"""Budgets, as shares of what a whole search takes."""

# One process of the test run replays the searches for the tests that look at them.
replays = pytest.mark.xdist_group("replayed-searches")


@pytest.fixture(scope="module", params=[5, pytest.param(20, marks=[pytest.mark.ci, pytest.mark.long])])
def replayed(request):
    """One search of each of so many synthetic spaces."""
    spaces = [Synthetic(number) for number in range(request.param)]
    return [(space, replay(space, number)) for number, space in enumerate(spaces)]


@replays
def test_the_answer_is_within_two_percent_of_the_best(replayed):
    answers = [result.answer for _, result in replayed]
    assert None not in answers
    close = [regret(space, result.answer) <= 0.02 for space, result in replayed if result.answer is not None]
    assert sum(close) >= 0.9 * len(close), [regret(space, result.answer or 0) for space, result in replayed]


@replays
def test_few_runs_in_fresh_processes_confirm_it(replayed):
    for _, result in replayed:
        assert sum(result.cold.values()) <= 12
        assert len(result.best_answer.best_run_ids) >= 2
        assert len(result.best_answer.baseline_run_ids) >= 2


@replays
def test_every_candidate_ends_with_a_verdict_and_most_are_never_run(replayed):
    for space, result in replayed:
        assert [one.candidate_number for one in result.best_answer.verdicts] == list(range(len(space.space.candidates)))
        kinds = Counter(one.verdict for one in result.best_answer.verdicts)
        assert kinds["measured"] < len(space.truth) / 3
        assert kinds["beaten"] > kinds["measured"]
        assert all(one.reason for one in result.best_answer.verdicts if one.verdict != "too_large")
        assert all((one.rate is not None) == (one.verdict == "measured") for one in result.best_answer.verdicts)


@replays
def test_every_value_of_every_knob_was_run_or_is_excluded_by_a_bound_or_its_chance(replayed):
    for space, result in replayed:
        ran = {line.candidate_number for line in result.lines if isinstance(line, Trial)}
        verdicts = {one.candidate_number: one.verdict for one in result.best_answer.verdicts}
        for name in space.space.candidates[0].knobs:
            run = {space.space.candidates[number].knobs[name] for number in ran}
            others = [number for number in space.truth if space.space.candidates[number].knobs[name] not in run]
            assert {verdicts[number] for number in others} <= {"bound", "beaten"}, name


def test_on_a_gpu_that_waits_for_its_host_compile_leads_within_90_s():
    """The figures of `benchmarks.best_fit`, with five seeds."""
    rows = launch_bound_rows(5)
    assert all(held for *_, held in rows), rows


def test_nothing_is_measured_twice_after_a_kill(space):
    result = FakeConductor(space, asking(space), 1).run()
    lines = [asking(space), space.space]
    for moves in (1, 2, 3, 5, 7, 11, 1000):
        # Each conductor forgets all but the journal, and its warm process is gone.
        again = FakeConductor(space, asking(space), moves, lines).run(moves)
    trials = [line for line in lines if isinstance(line, Trial) and not line.repeats]
    assert set(Counter(line.candidate_number for line in trials).values()) == {1}
    assert regret(space, again.answer or 0) == pytest.approx(regret(space, result.answer or 0), abs=0.02)


def test_the_budget_ends_the_trials_with_the_price_of_going_on(space):
    whole = replay(space, 1)
    result = replay(space, 1, asking(space, budget_s=whole.leader_s / 2))
    assert result.leader_s < whole.leader_s
    assert "the budget" in result.stopped_because
    assert re.search(r"next: [a-z_]+=.*, about .*, .* chance of 2 % or more", result.stopped_because)
    assert len(result.best_answer.best_run_ids) >= 2, "the answer is confirmed all the same"


@replays
def test_a_budget_that_ends_names_a_chance_or_what_was_never_run(replayed):
    for seed, (terrain, whole) in enumerate(replayed):
        share = SHARES[seed % len(SHARES)]
        result = replay(terrain, seed, asking(terrain, budget_s=whole.leader_s * share))
        if "the budget" in result.stopped_because:
            assert "under 1 %" not in result.stopped_because
            assert " 100 % chance" not in result.stopped_because
            assert "chance of 2 %" in result.stopped_because or "was never run" in result.stopped_because


def test_compilation_loses_a_short_training_and_wins_a_long_one():
    space = next(space for space in map(Synthetic, range(40)) if space._factors["default"] < 0.8)
    kinds = {}
    for steps in (20, 200_000):
        result = replay(space, 1, asking(space, "time", steps))
        assert result.answer is not None
        kinds[steps] = space.space.candidates[result.answer].knobs["compile"]
    assert kinds == {20: "off", 200_000: "default"}


@replays
@pytest.mark.parametrize("number", [3, 7])
def test_a_space_of_stages_ends_within_two_percent_with_fewer_candidates(number):
    space = Synthetic(number)
    result = replay(space, number, in_stages=True)
    assert result.answer is not None
    assert regret(space, result.answer) <= 0.02
    [*_, grown] = [line for line in result.lines if isinstance(line, Space)]
    assert len(grown.around) > 1, "it grew around a leader"
    assert result.answer in {number for number, one in enumerate(grown.candidates) if one.excluded_as is None}
    assert any(one.excluded_as == "not_tried" for one in grown.candidates)
    reasons = {one.reason for one in result.best_answer.verdicts if one.verdict == "bound"}
    assert REASON_OF_A_LEVER in reasons
    assert any("combinations were candidates" in note for note in result.best_answer.notes)
