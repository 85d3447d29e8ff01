"""The verdict on each candidate of a best-fit search, and the answer, which names no winner where noise decides."""

import msgspec
import pytest
from benchmarks.best_fit_replay import FakeConductor

from trainfast_runner.search.best.answer import CHOSEN_REASON, answer_of, best_report
from trainfast_runner.search.best.decide import BestState
from trainfast_runner.search.best_journal import BestEnded, ColdRun, ProcessReady
from trainfast_runner.search.journal import JournalWriter

from .synthetic import asking, cold, confirmed, process_ready, state_of, trial


def test_a_value_that_always_fails_is_given_up(space, base, begun):
    knobs = [one.knobs for one in space.space.candidates]
    compiled = [n for n in sorted(space.truth) if knobs[n]["compile"] == "default"]
    smallest = [n for n in compiled if knobs[n]["batch_size"] == 1]
    other = next(n for n in compiled if knobs[n] == {**knobs[base], "compile": "default"})
    lines = begun
    lines += [trial(one, outcome="failed", step_ms=[], reason="no compiler") for one in (smallest[0], other)]
    verdicts = state_of(space, *lines).ruled_out
    assert verdicts[compiled[-1]].verdict == "failed"
    assert "compile=default failed in 2 settings: no compiler" in verdicts[compiled[-1]].reason


def test_of_two_values_that_failed_only_together_neither_is_given_up_alone(space, begun):
    knobs = [one.knobs for one in space.space.candidates]
    compiled = [n for n in sorted(space.truth) if knobs[n]["compile"] == "default"]
    small = [n for n in sorted(space.truth) if knobs[n]["batch_size"] == 1]
    both = [n for n in compiled if n in small]
    lines = begun
    lines += [trial(one, outcome="failed", step_ms=[], reason="it crashed") for one in both[:2]]
    state = state_of(space, *lines)
    assert "batch_size=1 with " in state.ruled_out[both[-1]].reason
    assert "compile=default" in state.ruled_out[both[-1]].reason
    assert set(compiled) - set(both) <= set(state.remaining), "a larger batch may compile"
    assert set(small) - set(both) <= set(state.remaining), "the smallest batch may run without compiling"


def test_a_bound_by_flops_labels_candidates_that_are_never_run(space, base):
    bounded = sorted(space.truth)[-1]
    candidates = list(space.space.candidates)
    candidates[bounded] = msgspec.structs.replace(candidates[bounded], least_s_per_sample=1.0)
    space.space = msgspec.structs.replace(space.space, candidates=candidates)
    result = FakeConductor(space, asking(space), 1).run()
    assert bounded != base
    verdict = result.best_answer.verdicts[bounded]
    assert verdict.verdict == "bound"
    assert "at most 1 samples/s" in verdict.reason


def test_a_loss_that_leaves_the_baselines_fails_the_candidate_but_not_by_a_share_of_a_large_fall(space, base, other):
    runs = [cold(number, losses=[loss, loss]) for number, loss in ((base, 2.0), (other, 2.5))]
    verdict = state_of(space, *process_ready(space, base), trial(base), *runs).ruled_out[other]
    assert verdict.verdict == "failed"
    assert "2.5" in verdict.reason
    lines = [cold(other, "limit"), cold(base, losses=[8.0, 2.0]), cold(other, "race", losses=[8.0, 2.3])]
    verdicts = state_of(space, *process_ready(space, base), trial(base), *lines).ruled_out
    assert other not in verdicts, "0.3 is little of the way from 8 to 2"
    lines = [*process_ready(space, base), trial(base, losses=[8.0, 7.0, 6.0])]
    assert other not in state_of(space, *lines, trial(other, losses=[8.1, 6.9])).ruled_out
    verdict = state_of(space, *lines, trial(other, losses=[8.0, 7.9])).ruled_out[other]
    assert verdict.verdict == "failed"
    assert "the loss was 7.9 where the baseline's was 7" in verdict.reason


def test_starts_of_other_lengths_leave_the_rate_narrow_and_time_as_uncertain_from_either_side(space, base, begun):
    asked = asking(space, "time", 10)
    lines = [asked, space.space, *begun]
    lines += [
        msgspec.structs.replace(line, start_s=start_s) if isinstance(line, ColdRun) else line
        for start_s in (1.0, 60.0)
        for line in confirmed(base, (80.0,))
    ]
    answer = answer_of(BestState(lines, 0.0))
    assert answer.best_value.high / answer.best_value.low > 2, "the times differ"
    assert answer.best_rate.high / answer.best_rate.low < 1.1, "the rates do not"
    elsewhere = next(
        number
        for number in sorted(space.truth)
        if space.space.candidates[number].process_knobs != space.space.candidates[base].process_knobs
    )
    slow = ProcessReady(run_id="two", process_knobs=space.space.candidates[elsewhere].process_knobs, start_s=600.0)
    asked = asking(space, "time", 1000)
    ran = [*begun, slow, trial(elsewhere, run_id="two")]
    ranking = BestState([asked, space.space, *ran], 0.0).cold
    there, back = ranking.by_trials(elsewhere, base), ranking.by_trials(base, elsewhere)
    assert (there.mean, there.half_width) == (pytest.approx(-back.mean), pytest.approx(back.half_width))


def test_a_baseline_that_wins_says_within_how_much_noise_and_a_losing_leader_is_not_within(space, base, other, begun):
    lines = [*begun, trial(other, ms=99.5)]
    noisy = state_of(space, *lines, *confirmed(other, (80.0, 74.0)), *confirmed(base, (77.0, 84.0)))
    answer = answer_of(noisy)
    assert (answer.best_number, answer.tied_numbers) == (base, [other])
    assert answer.within_percent > 5
    quiet = answer_of(state_of(space, *lines, *confirmed(other, (60.0, 60.1)), *confirmed(base, (80.0, 80.1))))
    assert (quiet.best_number, quiet.within_percent, quiet.tied_numbers) == (base, None, []), (
        "clearly slower in fresh processes"
    )
    lines = [*begun, trial(other, ms=90.0)]
    answer = answer_of(state_of(space, *lines, *confirmed(other, (50.0, 50.5)), *confirmed(base, (80.0, 80.5))))
    assert (answer.best_number, answer.verdicts[other].reason) == (base, "-37.4 % against the best")


def test_a_lever_that_changes_the_first_losses_beyond_its_tolerance_fails(space, base):
    knobs = [one.knobs for one in space.space.candidates]

    def differing(**turned):
        return next(number for number, one in enumerate(knobs) if one == {**knobs[base], **turned})

    lines = [*process_ready(space, base), trial(base, losses=[8.0, 7.0, 6.0])]
    checkpointed, compiled = differing(checkpointing="full"), differing(compile="default")
    assert checkpointed not in state_of(space, *lines, trial(checkpointed, losses=[8.0, 7.000001, 6.0])).ruled_out
    verdict = state_of(space, *lines, trial(checkpointed, losses=[8.0, 7.07])).ruled_out[checkpointed]
    assert verdict.verdict == "failed"
    assert "by up to 0.01 of it, where its levers may cause 1e-06, compared with the baseline's" in verdict.reason
    assert compiled not in state_of(space, *lines, trial(compiled, losses=[8.1, 7.1])).ruled_out, "may draw dropout"


def searched(directory, space, state, *rates, spent_s=0.0):
    """JSON of a search of two settings, another and the baseline, confirmed at these samples/s."""
    base = space.space.baseline_number
    other = next(number for number in sorted(space.truth) if number != base)
    lines = [asking(space), space.space, *process_ready(space, base), trial(base, warm=False)]
    lines += [trial(other, ms=99.5), *confirmed(other, rates[0]), *confirmed(base, rates[1])]
    answer = answer_of(BestState(lines, spent_s))
    journal = JournalWriter(directory)
    for line in (*lines, BestEnded(state=state, answer=answer)):
        journal.write(line)
    journal.close()
    return best_report(directory)


def test_noise_decides_instead_of_a_winner(tmp_path, space):
    noisy = searched(tmp_path, space, "answered", (80.0, 74.0), (77.0, 84.0))
    assert noisy["winner"] is None
    assert noisy["within_percent"] > 5
    assert noisy["best"] is not None, "a setting to go on with"
    assert [one["reason"] for one in noisy["verdicts"] if one["knobs"] == noisy["best"]["knobs"]] == [CHOSEN_REASON]


@pytest.mark.parametrize("state", ["answered", "cancelled"])
def test_a_clear_answer_names_its_winner_and_a_search_cut_short_has_none_yet(tmp_path, space, state):
    found = searched(tmp_path, space, state, (90.0, 90.1), (80.0, 80.1))
    assert found["winner"] == (found["best"]["knobs"] if state == "answered" else None)
    assert found["within_percent"] is None


def test_a_search_that_its_budget_ended_says_how_far_it_came(tmp_path, space):
    cut = searched(tmp_path, space, "answered", (60.0, 60.1), (80.0, 80.1), spent_s=2e9)
    assert (cut["tried_in_budget"], cut["best"]["knobs"]) == (2, cut["baseline"]["knobs"])
    ran = [one["knobs"] for one in cut["trials"]]
    assert cut["effects"]
    assert all(any(knobs[one["knob"]] == one["value"] for knobs in ran) for one in cut["effects"]), "each was run"
