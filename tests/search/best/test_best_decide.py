"""The decisions of a best-fit search under a fake clock, over synthetic spaces and lines written by hand."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import msgspec
import pytest
from benchmarks.best_fit_replay import FakeConductor, Replayed, question, replay
from benchmarks.best_fit_spaces import Synthetic, regret

from trainfast_runner.search.best.cold_runs import COLD_LEAST, ColdRuns
from trainfast_runner.search.best.decide import LEAST, MOST, StepRule, decide
from trainfast_runner.search.best.found import found
from trainfast_runner.search.best.journal import (
    BestLine,
    BestQuestion,
    EarlierEffect,
    Interval,
    LaunchedBest,
    Ordered,
    Race,
    Space,
    Trial,
    Visited,
)
from trainfast_runner.search.best.known import BestKnown, known

SEEDS = 20


# One process of the test run replays the searches for the tests that look at them.
replays = pytest.mark.xdist_group("replayed-searches")


@pytest.fixture(scope="module")
def replayed() -> list[tuple[Synthetic, Replayed]]:
    """One search of each of so many synthetic spaces."""
    spaces = [Synthetic(number) for number in range(SEEDS)]
    return [(space, replay(space, number)) for number, space in enumerate(spaces)]


@pytest.fixture
def space() -> Synthetic:
    return Synthetic(10)


def asking(terrain: Synthetic, *words: object, **fields: object) -> BestQuestion:
    """The question that a synthetic space is searched for."""
    return question(terrain.name, terrain.space, *words, **fields)  # type: ignore[arg-type]


def trial(candidate: int, run_id: str = "one", ms: float = 100.0, **fields: object) -> Trial:
    """A trial of ten equal steps."""
    given: dict[str, object] = {"outcome": "measured", "warm": True, "step_ms": [ms * 1.001, ms * 0.999] * 5, **fields}
    return Trial(candidate=candidate, run_id=run_id, samples_per_step=8, **{"seconds": ms / 100, **given})  # type: ignore[arg-type]


def visited(terrain: Synthetic, candidate: int, run_id: str = "one") -> list[BestLine]:
    """The lines of a process that was started for a candidate."""
    process = terrain.space.candidates[candidate].process
    return [
        LaunchedBest(run_id=run_id, role="trial", candidate=candidate),
        Visited(run_id=run_id, process=process, start_s=5.0),
    ]


def known_of(terrain: Synthetic, *lines: BestLine, warm: str | None = None, spent_s: float = 0.0) -> BestKnown:
    return known([asking(terrain), terrain.space, *lines], spent_s, warm)


@replays
def test_the_answer_is_within_two_percent_of_the_best(replayed: list[tuple[Synthetic, Replayed]]) -> None:
    answers = [told.answer for _, told in replayed]
    assert None not in answers
    close = [regret(space, told.answer) <= 0.02 for space, told in replayed if told.answer is not None]
    assert sum(close) >= 18, [regret(space, told.answer or 0) for space, told in replayed]


@replays
def test_few_runs_in_fresh_processes_confirm_it(replayed: list[tuple[Synthetic, Replayed]]) -> None:
    for _, told in replayed:
        assert sum(told.cold.values()) <= 12
        assert told.found is not None
        assert len(told.found.best_run_ids) >= 2
        assert len(told.found.baseline_run_ids) >= 2


@replays
def test_every_candidate_ends_with_a_verdict_and_most_are_never_run(
    replayed: list[tuple[Synthetic, Replayed]],
) -> None:
    for space, told in replayed:
        assert told.found is not None
        assert [one.candidate for one in told.found.verdicts] == list(range(len(space.space.candidates)))
        kinds = Counter(one.verdict for one in told.found.verdicts)
        assert kinds["measured"] < len(space.truth) / 3
        assert kinds["beaten"] > kinds["measured"]
        assert all(one.reason for one in told.found.verdicts if one.verdict != "too_large")
        assert all((one.rate is not None) == (one.verdict == "measured") for one in told.found.verdicts)


@replays
def test_every_value_of_every_knob_was_run(replayed: list[tuple[Synthetic, Replayed]]) -> None:
    for space, told in replayed:
        ran = {line.candidate for line in told.lines if isinstance(line, Trial)}
        for name in space.space.candidates[0].knobs:
            possible = {space.space.candidates[number].knobs[name] for number in space.truth}
            assert {space.space.candidates[number].knobs[name] for number in ran} == possible, name


def test_nothing_is_measured_twice_after_a_kill(space: Synthetic) -> None:
    told = FakeConductor(space, asking(space), 1).run()
    lines: list[BestLine] = [asking(space), space.space]
    for moves in (1, 2, 3, 5, 7, 11, 1000):
        # Each conductor forgets all but the journal, and its warm process is gone.
        again = FakeConductor(space, asking(space), moves, lines).run(moves)
    void = known(lines, 0.0).measured.void
    trials = [line for line in lines if isinstance(line, Trial) and not line.repeats and line.run_id not in void]
    assert set(Counter(line.candidate for line in trials).values()) == {1}
    assert regret(space, again.answer or 0) == pytest.approx(regret(space, told.answer or 0), abs=0.02)


def test_the_same_journal_gives_the_same_decision_with_and_without_a_memory(space: Synthetic) -> None:
    conductor = FakeConductor(space, asking(space), 1)
    conductor.run(20)
    assert conductor.latest is not None
    fresh = known(conductor.lines, conductor.spent_s, conductor.run_id)
    followed = known(conductor.lines, conductor.spent_s, conductor.run_id, before=conductor.latest)
    assert decide(fresh).candidate == decide(followed).candidate
    assert fresh.posterior.mean == pytest.approx(followed.posterior.mean)


def test_the_baseline_opens_and_then_its_process_takes_the_largest_batch(space: Synthetic) -> None:
    first = decide(known_of(space))
    assert (first.action, first.candidate, first.cold) == ("trial", space.space.baseline, True)
    lines = [*visited(space, space.space.baseline), trial(space.space.baseline, warm=False)]
    second = decide(known_of(space, *lines, warm="one"))
    baseline = space.space.candidates[space.space.baseline].knobs
    assert second.candidate is not None
    turned = space.space.candidates[second.candidate].knobs
    assert not second.cold
    assert turned["batch_size"] > baseline["batch_size"]
    assert {**turned, "batch_size": 0, "grad_accum": 0} == {**baseline, "batch_size": 0, "grad_accum": 0}
    assert "largest batch" in second.why


def test_a_batch_that_runs_out_of_memory_rules_out_larger_ones(space: Synthetic) -> None:
    base = space.space.baseline
    lines: list[BestLine] = [*visited(space, base), trial(base, warm=False)]
    second = decide(known_of(space, *lines, warm="one")).candidate
    assert second is not None
    lines += [trial(second, outcome="oom", step_ms=[], reason="ran out of memory")]
    later = known_of(space, *lines)
    assert later.ruled_out[second].verdict == "too_large"
    third = decide(later)
    assert third.candidate is not None
    assert third.candidate not in later.ruled_out
    assert third.cold, "running out of memory ended the process"


def test_a_baseline_that_fails_ends_the_search(space: Synthetic) -> None:
    move = decide(known_of(space, trial(space.space.baseline, outcome="failed", step_ms=[], reason="no data")))
    assert (move.action, move.state) == ("end", "failed")
    assert "no data" in move.why


def test_the_smallest_setting_follows_a_baseline_that_does_not_fit(space: Synthetic) -> None:
    base = space.space.baseline
    move = decide(known_of(space, trial(base, outcome="oom", step_ms=[], reason="ran out of memory")))
    assert move.action == "trial"
    assert move.candidate is not None
    sizes = [space.space.candidates[number].predicted_bytes or 0 for number in space.truth if number != base]
    assert space.space.candidates[move.candidate].predicted_bytes == min(sizes)


def test_nothing_fits_where_every_setting_is_too_large(space: Synthetic) -> None:
    terrain = Synthetic(3)
    terrain.space = Space(
        candidates=[
            one if number == terrain.space.baseline else msgspec.structs.replace(one, ruled_out="too_large")
            for number, one in enumerate(terrain.space.candidates)
        ],
        baseline=terrain.space.baseline,
    )
    lines = [trial(terrain.space.baseline, outcome="oom", step_ms=[])]
    assert decide(known_of(terrain, *lines)).state == "nothing_fits"
    assert found(known_of(terrain, *lines)) is None


def test_a_process_that_drifted_is_void_and_its_settings_are_tried_again(space: Synthetic) -> None:
    base = space.space.baseline
    other = next(
        number
        for number in sorted(space.truth)
        if number != base and space.space.candidates[number].process == space.space.candidates[base].process
    )
    lines = [*visited(space, base), trial(base, warm=False), trial(other)]
    steady = known_of(space, *lines, trial(base, ms=101.0, repeats=True))
    assert set(steady.rated) == {base, other}
    drifted = known_of(space, *lines, trial(base, ms=105.0, repeats=True))
    assert drifted.rated == {}
    again = decide(drifted)
    assert (again.candidate, again.cold) == (base, True)


def test_void_trials_count_for_nothing(space: Synthetic) -> None:
    base = space.space.baseline
    void = trial(base, outcome="void", step_ms=[], reason="another run took the machine")
    assert decide(known_of(space, void)).candidate == base
    assert decide(known_of(space, *[void] * 3)).state == "failed"


def test_a_pinned_value_is_kept_and_a_skipped_one_left_out(space: Synthetic) -> None:
    orders: list[BestLine] = [
        Ordered(do="pin", knob="precision", value="bf16"),
        Ordered(do="skip", knob="checkpointing", value="full"),
    ]
    lines: list[BestLine] = [asking(space), space.space, *orders]
    told = FakeConductor(space, asking(space), 1, lines).run()
    base = space.space.baseline
    for line in lines:
        if isinstance(line, Trial) and line.candidate != base:
            knobs = space.space.candidates[line.candidate].knobs
            assert (knobs["precision"], knobs["checkpointing"]) == ("bf16", "off")
    assert told.found is not None
    reasons = {one.reason for one in told.found.verdicts if one.verdict == "not_tried"}
    assert "you pinned precision=bf16" in reasons
    assert "you skipped checkpointing=full" in reasons


def test_a_skipped_setting_alone_is_left_out(space: Synthetic) -> None:
    first = decide(known_of(space, trial(space.space.baseline))).candidate
    assert first is not None
    order = Ordered(do="skip", candidate=first)
    told = FakeConductor(space, asking(space), 1, [asking(space), space.space, order]).run()
    assert told.found is not None
    skipped = [one.candidate for one in told.found.verdicts if one.reason == "you skipped it"]
    assert skipped == [first]


def test_a_value_that_always_fails_is_given_up(space: Synthetic) -> None:
    base = space.space.baseline
    compiled = [n for n in sorted(space.truth) if space.space.candidates[n].knobs["compile"] == "default"][:2]
    lines = [*visited(space, base), trial(base, warm=False)]
    lines += [trial(one, outcome="failed", step_ms=[], reason="no compiler") for one in compiled]
    verdicts = known_of(space, *lines).ruled_out
    last = [n for n in sorted(space.truth) if space.space.candidates[n].knobs["compile"] == "default"][-1]
    assert verdicts[last].verdict == "failed"
    assert "compile=default failed in 2 settings: no compiler" in verdicts[last].reason


def test_a_bound_by_flops_labels_candidates_that_are_never_run(space: Synthetic) -> None:
    base = space.space.baseline
    bounded = sorted(space.truth)[-1]
    candidates = list(space.space.candidates)
    candidates[bounded] = msgspec.structs.replace(candidates[bounded], least_s_per_sample=1.0)
    space.space = msgspec.structs.replace(space.space, candidates=candidates)
    told = FakeConductor(space, asking(space), 1).run()
    assert told.found is not None
    assert bounded != base
    verdict = told.found.verdicts[bounded]
    assert verdict.verdict == "bound"
    assert "at most 1 samples/s" in verdict.reason


def test_the_budget_ends_the_trials_with_the_price_of_going_on(space: Synthetic) -> None:
    whole = replay(space, 1)
    told = replay(space, 1, asking(space, budget_s=whole.leader_s / 2))
    assert told.leader_s < whole.leader_s
    assert "the budget" in told.stopped_because
    assert "chance of 2 %" in told.stopped_because
    assert told.found is not None
    assert len(told.found.best_run_ids) >= 2, "the answer is confirmed all the same"


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 0.95])
def test_a_budget_that_ends_names_a_chance_or_what_was_never_run(share: float) -> None:
    for seed in range(6):
        terrain = Synthetic(seed)
        whole = replay(terrain, seed)
        told = replay(terrain, seed, asking(terrain, budget_s=whole.leader_s * share))
        if "the budget" in told.stopped_because:
            assert "a 0 % chance" not in told.stopped_because
            assert "chance of 2 %" in told.stopped_because or "never run: " in told.stopped_because


def test_compilation_loses_a_short_training_and_wins_a_long_one() -> None:
    space = next(space for space in map(Synthetic, range(40)) if space._factors["default"] < 0.8)
    kinds = {}
    for steps in (20, 200_000):
        told = replay(space, 1, asking(space, "time", steps))
        assert told.answer is not None
        kinds[steps] = space.space.candidates[told.answer].knobs["compile"]
    assert kinds == {20: "off", 200_000: "default"}


def test_an_oom_under_the_real_limit_rules_the_leader_out(space: Synthetic) -> None:
    asked = msgspec.structs.replace(asking(space), limits_bytes=[2**20])
    conductor = FakeConductor(space, asked, 1)
    while (move := conductor.next()).action == "trial":
        conductor.trial(move)
    assert move.action == "limit"
    leader = move.candidate
    assert leader is not None
    run = LaunchedBest(run_id="limited", role="limit", candidate=leader)
    end = Race(candidate=leader, role="limit", run_id="limited", outcome="oom", reason="ran out of memory", seconds=1.0)
    conductor.lines += [run, end]
    move = conductor.next()
    assert move.action == "limit"
    assert move.candidate != leader


def test_a_loss_that_leaves_the_baselines_fails_the_candidate(space: Synthetic) -> None:
    base, other = space.space.baseline, next(number for number in space.truth if number != space.space.baseline)
    runs = [
        Race(candidate=number, role="confirm", run_id=str(number), outcome="measured", last_loss=loss, seconds=1.0)
        for number, loss in ((base, 2.0), (other, 2.5))
    ]
    verdict = known_of(space, *visited(space, base), trial(base), *runs).ruled_out[other]
    assert verdict.verdict == "failed"
    assert "2.5" in verdict.reason


def test_a_run_under_the_limit_has_fewer_steps_and_its_loss_is_not_compared(space: Synthetic) -> None:
    base, other = space.space.baseline, next(number for number in space.truth if number != space.space.baseline)
    lines: list[BestLine] = [
        Race(candidate=other, role="limit", run_id="l", outcome="measured", last_loss=8.0, seconds=1.0),
        Race(
            candidate=base, role="confirm", run_id="b", outcome="measured", first_loss=8.0, last_loss=2.0, seconds=1.0
        ),
        Race(candidate=other, role="race", run_id="o", outcome="measured", first_loss=8.0, last_loss=2.3, seconds=1.0),
    ]
    verdicts = known_of(space, *visited(space, base), trial(base), *lines).ruled_out
    assert other not in verdicts, "0.3 is little of the way from 8 to 2"


def confirmed(candidate: int, rates: tuple[float, ...], role: str = "confirm") -> list[BestLine]:
    """Runs in fresh processes with these samples/s."""
    runs: list[BestLine] = []
    for place, rate in enumerate(rates):
        run_id = f"{role}-{candidate}-{place}"
        race = Race(candidate=candidate, role=role, run_id=run_id, outcome="measured", samples_per_s=rate, seconds=1.0)
        runs += [LaunchedBest(run_id=run_id, role=role, candidate=candidate), race]
    return runs


def test_a_baseline_that_wins_on_a_noisy_machine_says_within_how_much(space: Synthetic) -> None:
    base = space.space.baseline
    other = next(number for number in sorted(space.truth) if number != base)
    lines = [*visited(space, base), trial(base, warm=False), trial(other, ms=99.5)]
    noisy = known_of(space, *lines, *confirmed(other, (80.0, 74.0)), *confirmed(base, (77.0, 84.0)))
    answer = found(noisy)
    assert answer is not None
    assert (answer.best, answer.ties) == (base, [other])
    assert answer.within_percent is not None
    assert answer.within_percent > 5
    quiet = found(known_of(space, *lines, *confirmed(other, (60.0, 60.1)), *confirmed(base, (80.0, 80.1))))
    assert quiet is not None
    assert (quiet.best, quiet.within_percent, quiet.ties) == (base, None, []), "clearly slower in fresh processes"


def test_a_leader_that_loses_in_fresh_processes_is_not_within_the_noise_of_the_best(space: Synthetic) -> None:
    base = space.space.baseline
    other = next(number for number in sorted(space.truth) if number != base)
    lines = [*visited(space, base), trial(base, warm=False), trial(other, ms=90.0)]
    answer = found(known_of(space, *lines, *confirmed(other, (50.0, 50.5)), *confirmed(base, (80.0, 80.5))))
    assert answer is not None
    assert answer.best == base
    assert answer.verdicts[other].reason == "-37.4 % beside the best"


def test_the_losses_of_trials_compare_step_by_step(space: Synthetic) -> None:
    base, other = space.space.baseline, next(number for number in space.truth if number != space.space.baseline)
    lines = [*visited(space, base), trial(base, losses=[8.0, 7.0, 6.0])]
    assert other not in known_of(space, *lines, trial(other, losses=[8.1, 6.9])).ruled_out
    verdict = known_of(space, *lines, trial(other, losses=[8.0, 7.9])).ruled_out[other]
    assert verdict.verdict == "failed"
    assert "its loss was 7.9 where the baseline's was 7" in verdict.reason


def test_effects_of_earlier_searches_are_shown_as_such_and_shorten_none_of_the_checks(space: Synthetic) -> None:
    earlier = EarlierEffect(
        knob="precision",
        value="bf16",
        before="fp32",
        gain_percent=Interval(median=40.0, low=38.0, high=42.0),
        search_id="before",
    )
    asked = asking(space, earlier=(earlier,))
    begun = known([asked, space.space], 0.0)
    levels = begun.posterior.levels
    base = space.space.baseline
    other = levels.turned(base, "precision", levels.values["precision"].index("bf16"))
    assert other is not None
    mean, variance = begun.posterior.difference(other, base)
    assert mean == pytest.approx(math.log(1.4), abs=0.02)
    assert math.sqrt(variance) > 0.03, "the spread is widened"
    told = FakeConductor(space, asked, 1).run()
    assert told.found is not None
    assert any("earlier" in note for note in told.found.notes)


def test_a_trial_takes_more_steps_until_it_is_sure_and_stops_early_when_it_is_slow() -> None:
    rule = StepRule(give_up_ms=150.0)
    assert rule.judge([100.0] * (LEAST - 1)) == "more"
    assert rule.judge([100.0] * LEAST) == "enough"
    assert rule.judge([90.0, 110.0, 85.0, 118.0, 100.0]) == "more"
    assert rule.judge([90.0, 110.0] * MOST) == "enough"
    assert rule.judge([200.0, 190.0]) == "slow"
    assert replace(rule, give_up_ms=None).judge([200.0, 190.0]) == "more"


def test_drift_on_a_machine_that_others_disturb_is_noise_and_voids_nothing(space: Synthetic) -> None:
    base = space.space.baseline
    lines = [*visited(space, base), trial(base, warm=False, reason="other processes took 70% of the CPU")]
    other = next(number for number in sorted(space.truth) if number != base)
    noisy = known_of(space, *lines, trial(other, ms=95.0), trial(base, ms=130.0, repeats=True))
    assert set(noisy.rated) == {base, other}
    answer = found(noisy)
    assert answer is not None
    assert answer.within_percent is not None
    assert answer.within_percent > 30, "the drift widens every interval"
    assert "within the noise of the best" in answer.verdicts[base].reason


def test_beyond_the_budget_there_is_no_race_and_the_answer_is_confirmed_all_the_same(space: Synthetic) -> None:
    base = space.space.baseline
    other = next(number for number in sorted(space.truth) if number != base)
    lines: list[BestLine] = [*visited(space, base), trial(base, warm=False), trial(other, ms=99.0)]
    asked = asking(space, budget_s=600.0)
    late = [decide(known([asked, space.space, *lines], spent_s)) for spent_s in (599.0, 700.0)]
    assert [(move.action, move.candidate) for move in late] == [("confirm", other), ("confirm", other)]


def test_slow_steps_shorten_the_runs_that_confirm_to_half_of_the_budget(space: Synthetic) -> None:
    base = space.space.baseline
    samples = space.space.candidates[base].samples_per_step
    for ms, steps in ((100.0, 60), (4800.0, 14), (60_000.0, COLD_LEAST)):
        slow = [ms * share * 8 / samples for share in (0.9, 1.1)]
        noisy = trial(base, warm=False, step_ms=slow * 5, seconds=1.0)
        lines = [asking(space, budget_s=600.0), space.space, *visited(space, base), noisy]
        assert ColdRuns(known(lines, 0.0)).steps == steps
