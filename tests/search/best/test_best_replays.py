"""Whole best-fit searches, replayed under a fake clock: of synthetic spaces, and of recorded grids with their noise."""

import itertools
import json
import math
import re
from collections import Counter

import pytest
from benchmarks.best_fit import CLOSE, launch_bound_rows
from benchmarks.best_fit_replay import FakeConductor, replay
from benchmarks.best_fit_spaces import Recorded, Synthetic, cold_grid_s, recorded, regret

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


SIZES = (1, 2, 4, 8)
PRECISIONS = ("fp32", "bf16")


def grid(folder, factors=(1.0, 1.0, 1.0)):
    """A grid of a pass for each factor, which slows the larger batches of that pass. Each pass drifts further."""
    candidates = []
    for precision in PRECISIONS:
        for size in SIZES:
            knobs = {"batch_size": size, "precision": precision, "grad_accum": 8 // size}
            candidates.append({"knobs": knobs, "process": {}, "samples_per_step": 8, "ruled_out": None, "reason": ""})
    visits = []
    for number, factor in enumerate(factors):
        trials = []
        for place, one in enumerate(candidates):
            size = one["knobs"]["batch_size"]
            ms = (60 + 80 / size) * (0.8 if one["knobs"]["precision"] == "bf16" else 1.0) * (factor if size > 4 else 1)
            for round_ in range(2):
                drift = 1 + 0.3 * number + 0.02 * len(trials)
                steps = [ms * drift * (1 + 0.002 * (step % 3)) for step in range(6)]
                switch_s = 0.0 if round_ else 0.2
                trials.append({"candidate": place, "step_ms": steps, "anchor_ms": 100 * drift, "switch_s": switch_s})
        visits.append({"pass": number, "process": {}, "start_s": 4.0, "trials": trials})
    path = folder / "small.json"
    path.write_text(json.dumps({"candidates": candidates, "baseline": 0, "visits": visits}))
    return Recorded(path)


def noise_of(grid):
    """The share by which the winner of one pass was slower than the best in another."""
    worst = 0.0
    for mine, other in itertools.permutations(range(grid.passes), 2):
        winner = max(grid.rates, key=lambda number: grid.rates[number][mine])
        best = max(rates[other] for rates in grid.rates.values())
        worst = max(worst, 1 - math.exp(grid.rates[winner][other] - best))
    return worst


def test_a_search_finds_the_best_of_a_recorded_grid(tmp_path):
    small = grid(tmp_path)
    assert small.passes == 3
    assert noise_of(small) == pytest.approx(0.0)
    result = replay(small, 0)
    assert result.answer is not None
    assert regret(small, result.answer) <= 0.02
    assert result.starts == 1
    assert 0 < result.leader_s < cold_grid_s(small)


def test_the_anchor_takes_the_drift_of_the_machine_out_of_the_figures(tmp_path):
    for rates in grid(tmp_path).rates.values():
        assert rates == pytest.approx([rates[0]] * 3)


GRIDS = recorded()
SEEDS, MIN_CLOSE_ANSWERS = 20, 18


def test_a_recorded_grid_can_judge():
    for one in GRIDS:
        assert noise_of(one) <= CLOSE / 2
        assert one.passes >= 3
        assert len(one.truth) >= 60


@pytest.mark.parametrize("judge", GRIDS, ids=[one.name for one in GRIDS])
def test_a_search_finds_the_best_of_a_grid_of_a_real_machine(judge):
    answers = [replay(judge, seed).answer for seed in range(SEEDS)]
    close = [answer for answer in answers if answer is not None and regret(judge, answer) <= CLOSE]
    assert len(close) >= MIN_CLOSE_ANSWERS
