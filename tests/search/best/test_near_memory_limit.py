"""Runs of a best-fit search under the real memory_limit."""

import msgspec
import pytest
from benchmarks.best_fit_replay import FakeConductor

from trainfast_runner.search.best.answer import answer_of
from trainfast_runner.search.best.decide import BestState, decide
from trainfast_runner.search.best_journal import ColdRun

from .synthetic import asking, cold, confirmed, process_ready, trial
from .test_best_for_real import SMALL


def test_the_answer_runs_under_the_limit_once(space):
    result = FakeConductor(space, msgspec.structs.replace(asking(space), limits_bytes=[2**50]), 1).run()
    limited = [one.candidate_number for one in result.lines if isinstance(one, ColdRun) and one.role == "limit"]
    assert limited.count(result.answer) == 1
    assert len(limited) == len(set(limited)) <= 3, "the leader, the winner of the race and the answer"


def test_a_run_under_the_limit_is_no_speed(space, base, begun):
    slow = cold(base, "limit", samples_per_s=1.0)
    lines = [asking(space), space.space, *begun, slow]
    answer = answer_of(BestState(lines, 0.0))
    assert answer.best_rate.low > 50, "its trial took 100 ms for 8 samples"


@pytest.mark.parametrize("least", [977_000, 1_000_000, 1_024_000, 1_050_000])
def test_memory_within_five_percent_of_the_least_is_the_same(space, least, base, other, begun):
    lines = [asking(space), space.space, *begun, trial(other)]
    races = [
        cold(number, "race", run_id=f"{number}-{turn}", samples_per_s=80.0 + turn, peak_allocated_bytes=peak)
        for number, peak in ((base, least * 104 // 100), (other, least))
        for turn in range(2)
    ]
    ranking = BestState([*lines, *races], 0.0).cold
    assert {ranking.winner_number, *ranking.ties} == {base, other}
    assert ranking.winner_number == base, "it overrides no knob"


def test_a_baseline_that_does_not_fit_under_the_limit_is_not_the_answer(space, base, other, begun):
    asked = msgspec.structs.replace(asking(space), limits_bytes=[2**50])
    end = cold(base, "limit", "oom", run_id="u", reason="it failed")
    lines = [asked, space.space, *begun, trial(other, ms=99.9)]
    lines += [*confirmed(other, (80.0, 80.1)), *confirmed(base, (80.0, 80.1)), end]
    answer = answer_of(BestState(lines, 0.0))
    assert answer.best_number == other
    assert answer.gain_percent is None, "there is nothing to gain on"
    assert "the baseline does not fit: it failed" in " ".join(answer.notes)


def test_trials_go_on_where_all_that_was_measured_does_not_fit_under_the_limit(space, base, other, begun):
    asked = msgspec.structs.replace(asking(space), limits_bytes=[2**50])
    lines = [asked, space.space, *begun]
    lines += [
        cold(base, "limit", "oom", run_id="u", reason="it failed"),
        *process_ready(space, other, "two"),
        trial(other, "two", warm=False),
    ]
    assert decide(BestState(lines, 0.0)).step.action == "trial", "one setting is no answer yet"


@pytest.mark.long
def test_the_answer_runs_under_a_real_limit(cli):
    words = ("tiny-llama", *SMALL, "--set", "model.hidden_size=256", "--set", "batch_size=32")
    predicted = cli("predict", *words, "--json").json["predicted"]["total_bytes"]
    limit = f"memory_limit={predicted // 2**20 + 24}MiB"
    grid = ("--vary", "batch_size=8,32", "--vary", "precision=fp32,bf16", "--global-batch", "32")
    done = cli("search", "best", *words, "--set", limit, *grid, "--budget", "2m", "--json")
    assert done.code == 0, done.err
    under = [one["knobs"] for one in done.json["races"] if one["role"] == "limit" and one["outcome"] != "void"]
    assert done.json["best"]["knobs"] in under
    assert all(under.count(knobs) == 1 for knobs in under)
