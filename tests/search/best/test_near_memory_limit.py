"""Runs of a best-fit search under the real memory_limit: the answer, and every measured setting near the limit."""

from typing import Any

import msgspec
import pytest
from benchmarks.best_fit_replay import FakeConductor, Replayed
from benchmarks.best_fit_spaces import Synthetic

from trainfast_runner.search.best.answer import answer_of
from trainfast_runner.search.best.cold_runs import NEAR_LIMIT_SHARE, ColdRanking
from trainfast_runner.search.best.decide import decide
from trainfast_runner.search.best.state import state_of_best_journal
from trainfast_runner.search.best_journal import BestAnswer, BestLaunched, BestLine, BestQuestion, ColdRun

from .synthetic import asking, cold, confirmed, process_ready, trial
from .test_best_for_real import SMALL


def replayed_answer(result: Replayed) -> BestAnswer:
    assert result.best_answer is not None
    return result.best_answer


def measured(answer: BestAnswer) -> list[int]:
    return [one.candidate_number for one in answer.verdicts if one.verdict == "measured"]


def needed(space: Synthetic, number: int) -> int:
    return space.space.candidates[number].predicted_bytes or 0


def limited(space: Synthetic, **more: object) -> BestQuestion:
    """The question under a limit that the largest setting of the same search without one just fits."""
    largest = max(
        needed(space, number) for number in measured(replayed_answer(FakeConductor(space, asking(space), 1).run()))
    )
    return msgspec.structs.replace(asking(space, **more), limits_bytes=[largest])


def near(space: Synthetic, question: BestQuestion, answer: BestAnswer) -> set[int]:
    return {one for one in measured(answer) if needed(space, one) > NEAR_LIMIT_SHARE * question.limits_bytes[0]}


def test_the_answer_and_every_measured_setting_near_the_limit_run_under_it_once(space):
    asked = limited(space)
    result = FakeConductor(space, asked, 1).run()
    answer = replayed_answer(result)
    ran = [one.candidate_number for one in result.lines if isinstance(one, ColdRun) and one.role == "limit"]
    assert len(ran) == len(set(ran)), "once each"
    expected = near(space, asked, answer)
    assert expected - {answer.best_number}, "a setting near the limit that is not the answer"
    assert set(ran) >= expected | {answer.best_number}
    last = max(place for place, one in enumerate(result.lines) if isinstance(one, ColdRun) and one.role != "limit")
    after = {one.candidate_number for one in result.lines[last + 1 :] if isinstance(one, ColdRun)}
    assert after <= expected, "far ones need none"


def test_a_setting_that_does_not_fit_under_the_limit_is_too_large_and_the_answer_stays(space):
    asked = limited(space)
    result = FakeConductor(space, asked, 1).run()
    answer = replayed_answer(result)
    beside = min(near(space, asked, answer) - {answer.best_number, space.space.baseline_number, *answer.tied_numbers})
    lines: list[BestLine] = [
        msgspec.structs.replace(one, outcome="oom", reason="an allocation of 8 MiB failed", missing_bytes=2**20)
        if isinstance(one, ColdRun) and (one.candidate_number, one.role) == (beside, "limit")
        else one
        for one in result.lines
    ]
    again = answer_of(state_of_best_journal(lines, result.seconds))
    assert again.best_number == answer.best_number
    verdict = again.verdicts[beside]
    assert (verdict.verdict, verdict.excess_bytes) == ("too_large", 2**20)
    assert verdict.reason.startswith("an allocation of 8 MiB failed, at least 1 MiB too large; predicted ")


def test_a_run_under_the_limit_is_no_speed(space, base, begun):
    slow = cold(base, "limit", samples_per_s=1.0)
    lines = [asking(space), space.space, *begun, slow]
    answer = answer_of(state_of_best_journal(lines, 0.0))
    assert answer.best_rate.low > 50, "its trial took 100 ms for 8 samples"


@pytest.mark.parametrize("least", [977_000, 1_000_000, 1_024_000, 1_050_000])
def test_memory_within_five_percent_of_the_least_is_the_same(space, least, base, other, begun):
    lines = [asking(space), space.space, *begun, trial(other)]
    races = [
        cold(number, "race", run_id=f"{number}-{turn}", samples_per_s=80.0 + turn, peak_allocated_bytes=peak)
        for number, peak in ((base, least * 104 // 100), (other, least))
        for turn in range(2)
    ]
    ranking = ColdRanking(state_of_best_journal([*lines, *races], 0.0))
    assert sorted(ranking.equally_fast) == sorted([base, other])
    assert ranking.winner_number == base, "it overrides no knob"


def test_without_time_a_setting_near_the_limit_says_that_it_was_not_run_under_it(space, base, begun):
    other = next(one for one in sorted(space.truth) if one != base and needed(space, one) != needed(space, base))
    large, small = sorted((base, other), key=lambda one: -needed(space, one))
    limit = [needed(space, large)]
    asked = msgspec.structs.replace(asking(space, budget_s=600.0), limits_bytes=limit)
    under = cold(small, "limit", run_id="u")
    lines = [asked, space.space, *begun]
    lines += [trial(other, ms=100.0), *confirmed(small, (80.0, 80.1)), *confirmed(large, (60.0, 60.1)), under]
    late = state_of_best_journal(lines, 700.0)
    assert ColdRanking(late).answer_number == small
    assert ColdRanking(late).unchecked == [large]
    answer = answer_of(late)
    assert answer.verdicts[large].reason.endswith("no time was left to run it under memory_limit")


def test_a_baseline_that_does_not_fit_under_the_limit_is_not_the_answer(space, base, other, begun):
    asked = msgspec.structs.replace(asking(space), limits_bytes=[2**50])
    end = cold(base, "limit", "oom", run_id="u", reason="it failed")
    lines = [asked, space.space, *begun, trial(other, ms=99.9)]
    lines += [*confirmed(other, (80.0, 80.1)), *confirmed(base, (80.0, 80.1)), end]
    answer = answer_of(state_of_best_journal(lines, 0.0))
    assert answer.best_number == other
    assert answer.gain_percent is None, "there is nothing to gain on"
    assert "the baseline does not fit: it failed" in " ".join(answer.notes)


def test_trials_go_on_where_all_that_was_measured_does_not_fit_under_the_limit(space, base, other, begun):
    asked = msgspec.structs.replace(asking(space), limits_bytes=[2**50])
    lines: list[BestLine] = [asked, space.space, *begun]
    lines += [
        BestLaunched(run_id="u", role="limit", candidate_number=base),
        cold(base, "limit", "oom", run_id="u", reason="it failed"),
        *process_ready(space, other, "two"),
        trial(other, "two", warm=False),
    ]
    assert decide(state_of_best_journal(lines, 0.0)).step.action == "trial", "one setting is no answer yet"


@pytest.mark.long
def test_settings_near_a_real_limit_run_under_it(cli):
    words = ("tiny-llama", *SMALL, "--set", "model.hidden_size=256", "--set", "batch_size=32")
    predicted: int = cli("predict", *words, "--json").json["predicted"]["total_bytes"]
    limit = f"memory_limit={predicted // 2**20 + 24}MiB"
    grid = ("--vary", "batch_size=8,32", "--vary", "precision=fp32,bf16", "--global-batch", "32")
    done = cli("search", "best", *words, "--set", limit, *grid, "--budget", "2m", "--json")
    assert done.code == 0, done.err
    answer: dict[str, Any] = done.json
    under = [one["knobs"] for one in answer["races"] if one["role"] == "limit" and one["outcome"] != "void"]
    assert answer["best"]["knobs"] in under
    assert all(under.count(knobs) == 1 for knobs in under)
    for one in answer["verdicts"]:
        near = one["predicted_bytes"] is not None and one["predicted_bytes"] > NEAR_LIMIT_SHARE * (
            predicted + 24 * 2**20
        )
        if near and one["verdict"] == "measured":
            assert one["knobs"] in under or "no time was left" in one["reason"], one
