"""The predicted memory of pipeline stages: the schedule's order, and the timeline cut at the blocks."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some
from tests.core.test_memory_model import BLOCK, HEAD, KEPT_BY_BLOCK, PASSING, ROOT, model_of, spec_with

from trainfast_runner.errors import UserError
from trainfast_runner.memory.model import MemoryModel
from trainfast_runner.memory.pipeline import PipelineAction, PipelineCut, StageCut, schedule_actions

HIDDEN, OUTPUT = 5, 11
"""Elements a sample of what passes between stages, and of the logits."""


def staged(layers: int, stages: int) -> MemoryModel:
    """`model_of` in equal stages, what is outside of its blocks being its head."""
    each = layers // stages
    cut = [
        StageCut(at * each, (at + 1) * each, each * BLOCK + ROOT * (at == stages - 1), BLOCK) for at in range(stages)
    ]
    return msgspec.structs.replace(model_of(layers), pipeline=PipelineCut(cut, 0, HIDDEN, OUTPUT))


@given(
    schedule=some.sampled_from(["gpipe", "1f1b", "interleaved"]), degree=some.integers(2, 8), rounds=some.integers(1, 6)
)
def test_every_micro_batch_goes_forward_and_then_backward(schedule: str, degree: int, rounds: int) -> None:
    held, micro_batches = 2 if schedule == "interleaved" else 1, degree * rounds
    for rank in range(degree):
        done = schedule_actions(schedule, rank, degree, micro_batches)
        flying = [0] * held
        for action in done:
            flying[action.stage] += -1 if action.backward else 1
            assert flying[action.stage] >= 0
        assert flying == [0] * held
        for slot in range(held):
            for backward in (False, True):
                assert done.count(PipelineAction(slot, backward)) == micro_batches


@pytest.mark.parametrize(("schedule", "most"), [("gpipe", [8, 8, 8, 8]), ("1f1b", [4, 3, 2, 1])])
def test_micro_batches_in_flight(schedule: str, most: list[int]) -> None:
    for rank in range(4):
        flying = peak = 0
        for action in schedule_actions(schedule, rank, 4, 8):
            flying += -1 if action.backward else 1
            peak = max(peak, flying)
        assert peak == most[rank]


@given(each=some.integers(1, 40), parts=some.sampled_from([2, 4, 8]), size=some.integers(1, 500))
def test_gpipe_keeps_the_activations_of_all_micro_batches(each: int, parts: int, size: int) -> None:
    model = staged(2 * each, 2)
    spec = spec_with(strategy="pp", pp_degree=2, pp_schedule="gpipe", micro_batches=parts, batch_size=size * parts)
    predicted = model.predict(spec, 2)
    parameters = each * BLOCK + ROOT
    buffers = 4 * HIDDEN * size * parts
    assert predicted.communication_bytes == buffers
    assert predicted.phases["optimizer"]["total"] == 20 * parameters + buffers + 8 * size * parts
    # Rank 1 before its first backward; the head's own bytes stand twice while its gradient is made.
    logits = 4 * OUTPUT * size
    flying = parts * (size * (each * KEPT_BY_BLOCK + HEAD) + logits)
    standing = 12 * parameters + buffers + 8 * size * parts
    assert predicted.phases["forward_backward"]["total"] >= standing + flying + size * HEAD
    if size * HEAD > 4 * parameters + 4 * BLOCK + size * PASSING:
        assert predicted.phases["forward_backward"]["total"] == standing + flying + size * HEAD
        assert predicted.fullest == "rank 1 of a pipeline of 2"


def test_a_schedule_that_keeps_fewer_takes_less() -> None:
    model = staged(48, 4)
    totals = {}
    for schedule in ("gpipe", "1f1b"):
        spec = spec_with(strategy="ddp+pp", pp_degree=4, pp_schedule=schedule, micro_batches=8, batch_size=8000)
        totals[schedule] = model.predict(spec, 8)
    assert totals["1f1b"].total_bytes < totals["gpipe"].total_bytes
    assert totals["1f1b"].fullest == "rank 0 of a pipeline of 4", "it has four micro-batches under way, the last one"


def test_a_tied_weight_is_on_both_ends() -> None:
    model = staged(6, 2)
    assert model.pipeline is not None
    cut = [StageCut(0, 3, 3 * BLOCK + ROOT, ROOT), StageCut(3, 6, 3 * BLOCK + ROOT, ROOT)]
    tied = msgspec.structs.replace(model, pipeline=PipelineCut(cut, ROOT, HIDDEN, OUTPUT))
    spec = spec_with(strategy="pp", pp_degree=2, pp_schedule="gpipe", micro_batches=2, batch_size=2)
    assert tied.predict(spec, 2).params_bytes == 4 * (3 * BLOCK + ROOT)


def test_the_largest_batch_is_whole_micro_batches() -> None:
    model = staged(12, 2)
    spec = spec_with(strategy="pp", pp_degree=2, micro_batches=8, pp_schedule="1f1b")
    most = model.max_batch(spec, 2, 3_000_000)
    assert most > 0
    assert most % 8 == 0


def test_another_cut_than_was_traced_is_not_answered() -> None:
    with pytest.raises(UserError, match="pipeline memory"):
        staged(12, 2).predict(spec_with(strategy="pp", pp_degree=4), 4)


@given(each=some.integers(3, 40), size=some.integers(1000, 5000))
def test_layers_spread_over_two_gpus_have_the_whole_batch(each: int, size: int) -> None:
    model, spec = staged(2 * each, 2), spec_with(strategy="naive-mp", devices=2, batch_size=size)
    last = model.predict(spec)
    assert last.activations_bytes == size * (8 + each * KEPT_BY_BLOCK + HEAD)
    assert "GPU 2 of the 2" in last.fullest
    assert model.pipeline is not None
    tied = msgspec.structs.replace(model, pipeline=msgspec.structs.replace(model.pipeline, head=0))
    assert "GPU 1 of the 2" in tied.predict(spec).fullest, "a tied head is where the embedding is"
