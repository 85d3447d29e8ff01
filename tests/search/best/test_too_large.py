"""Settings that ran out of memory: by how much they are too large, and runs under the real memory_limit."""

import threading
from types import SimpleNamespace

import msgspec
import pytest
from benchmarks.best_fit_replay import FakeConductor

from trainfast_runner.search.best import question
from trainfast_runner.search.best.answer import answer_of
from trainfast_runner.search.best.decide import BestState, decide
from trainfast_runner.search.best.question import oom_reason, oom_verdict, plan_preset_best
from trainfast_runner.search.best_journal import BestRequest, Candidate, ColdRun
from trainfast_runner.settings.spec import resolve

from .synthetic import asking, cold, confirmed, process_ready, state_of, trial
from .test_best_for_real import SMALL

MIB = 2**20
ON_GPU = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.25 GiB of which 512.00 MiB is"
    " free. Including non-PyTorch memory, this process has 78.74 GiB memory in use."
)
ON_CPU = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 67108864 bytes. Error code 12"


@pytest.mark.parametrize(
    ("message", "missing_bytes", "reason"),
    [
        (ON_GPU, None, "an allocation of 2,048 MiB failed with 512 MiB free"),
        (ON_CPU, None, "an allocation of 64 MiB failed"),
        (ON_CPU, 14 * MIB, "an allocation of 64 MiB failed, at least 14 MiB too large"),
        ("std::bad_alloc\nat 0x1", None, "std::bad_alloc"),
    ],
)
def test_an_allocators_message_tells_what_was_asked_what_was_free_and_what_was_missing(message, missing_bytes, reason):
    assert oom_reason(message, missing_bytes) == reason


def cpu_verdicts(monkeypatch, *settings):
    """The exclusion and the excess by number of ranks, if each rank needs 600 MiB and the host has 1000 MiB free."""
    ranks = BestRequest(vary={"strategy": ["single", "ddp"]})
    best = plan_preset_best(resolve("tiny-llama", ["devices=2", *settings]), ranks)
    predicted = SimpleNamespace(total_bytes=600 * MIB, context_bytes=None)
    model = SimpleNamespace(predict=lambda spec, ranks: predicted)
    monkeypatch.setattr(question, "trace_models", lambda *words, **options: iter(()))
    monkeypatch.setattr(question, "cached_models", lambda *words: lambda spec: model)
    monkeypatch.setattr(question, "read_host_free_bytes", lambda: 1000 * MIB)
    space = best.predict_candidates(threading.Event())
    return {one.world_size: (one.excluded_as, one.excess_bytes) for one in space.candidates}


@pytest.mark.parametrize(
    ("settings", "excluded", "excesses"),
    [
        ((), (None, "too_large"), (None, 150)),
        # The baseline is run all the same.
        (("strategy=single", "memory_limit=800MiB"), (None, "too_large"), (None, 150)),
        (("strategy=ddp", "memory_limit=800MiB"), (None, None), (None, 150)),
        # All ranks fit: the verdict is on the limit itself.
        (("memory_limit=500MiB",), (None, "too_large"), (100, 100)),
    ],
)
def test_each_candidate_on_a_cpu_has_its_own_share_of_the_free_memory(monkeypatch, settings, excluded, excesses):
    sizes = [None if excess is None else excess * MIB for excess in excesses]
    assert cpu_verdicts(monkeypatch, *settings) == dict(zip((1, 2), zip(excluded, sizes, strict=True), strict=True))


def test_a_verdict_has_the_prediction_and_what_was_measured():
    measured = "an allocation of 64 MiB failed"
    assert oom_verdict(measured, Candidate(knobs={}, predicted_bytes=40 * MIB)) == f"{measured}; predicted 40 MiB"
    assert oom_verdict(measured, Candidate(knobs={})) == measured


def test_a_larger_batch_that_was_measured_stays(space):
    base, candidates = space.space.baseline_number, space.space.candidates
    own = candidates[base].knobs
    larger = [
        number
        for number, one in enumerate(candidates)
        if one.knobs["batch_size"] > own["batch_size"]
        and all(one.knobs[name] == own[name] for name in own if name not in ("batch_size", "grad_accum"))
    ]
    oom = trial(base, outcome="oom", step_ms=[], reason="an allocation of 64 MiB failed")
    ruled_out = state_of(space, *process_ready(space, larger[0]), trial(larger[0]), oom).ruled_out
    assert base in ruled_out
    assert larger[0] not in ruled_out
    assert set(larger[1:]) <= set(ruled_out)


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
