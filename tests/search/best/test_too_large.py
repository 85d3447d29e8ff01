"""Verdicts on settings that ran out of memory: by how much they are too large, as far as that is known."""

import threading
from types import SimpleNamespace

import pytest

from trainfast_runner.search.best import question
from trainfast_runner.search.best.question import oom_reason, oom_verdict, plan_preset_best
from trainfast_runner.search.best_journal import BestRequest, Candidate
from trainfast_runner.settings.spec import resolve

from .synthetic import process_ready, state_of, trial

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
