"""From the course of a step to predictions: depth, batch, accumulation, sharing, and what is remembered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some
from layered_model import BLOCK, HEAD, KEPT_BY_BLOCK, PASSING, ROOT, Tracer, model_of, spec_with

from trainfast_runner.errors import UserError
from trainfast_runner.memory import tracing
from trainfast_runner.memory.pipeline import PipelineCut, StageCut, stage_count
from trainfast_runner.memory.prediction import CATEGORIES
from trainfast_runner.memory.sharding import (
    PIPELINE_STRATEGIES,
    PREDICTED_STRATEGIES,
    STAGED_STRATEGIES,
    WholeModel,
    memory_rule,
)
from trainfast_runner.memory.timeline import BlockPosition, BlockStack, Moment
from trainfast_runner.memory.tracing import cached_model, cached_models
from trainfast_runner.settings.spec import resolve
from trainfast_runner.worker.catalog import OPTIMIZERS


@given(layers=some.integers(1, 200), batch=some.integers(1, 10_000))
def test_a_deep_model_is_its_blocks_and_its_head(layers: int, batch: int) -> None:
    predicted = model_of(layers).predict(spec_with(batch_size=batch))
    standing = 12 * (layers * BLOCK + ROOT)
    at_the_head = standing + batch * (8 + layers * KEPT_BY_BLOCK + HEAD + HEAD)
    last_block = standing + 4 * ROOT + 4 * BLOCK + batch * (8 + layers * KEPT_BY_BLOCK + PASSING)
    first_block = standing + 4 * ROOT + layers * 4 * BLOCK + batch * (8 + KEPT_BY_BLOCK + PASSING)
    assert predicted.phases["forward_backward"]["total"] == max(at_the_head, last_block, first_block)
    assert predicted.phases["optimizer"]["total"] == 20 * (layers * BLOCK + ROOT) + 8 * batch
    assert predicted.total_bytes == max(phase["total"] for phase in predicted.phases.values())
    assert sum(predicted.category(name) for name in CATEGORIES) == predicted.total_bytes


@given(layers=some.integers(1, 60), limit=some.integers(0, 5_000_000), micro=some.integers(1, 4))
def test_the_largest_batch_fits_and_the_next_does_not(layers: int, limit: int, micro: int) -> None:
    model, spec = model_of(layers), spec_with(grad_accum=micro)
    most = model.max_batch(spec, 1, limit)

    def total(batch: int) -> int:
        return model.predict(replace(spec, knobs={**spec.knobs, "batch_size": batch})).total_bytes

    assert total(most + 1) > limit
    assert most == 0 or total(most) <= limit


def test_gradients_live_through_later_micro_batches() -> None:
    model = model_of(12)
    once, twice, often = (model.predict(spec_with(batch_size=5000, grad_accum=count)) for count in (1, 2, 8))
    assert once.grads_bytes == 0, "the peak is before the first gradient"
    assert twice.grads_bytes == 4 * (12 * BLOCK + ROOT), "the second micro-batch's peak has all gradients beside it"
    assert often.total_bytes - twice.total_bytes == 6 * 5000 * 8, "only the batches themselves are more"


def test_what_a_strategy_shares() -> None:
    model, count = model_of(12), 12 * BLOCK + ROOT
    alone = model.predict(spec_with(batch_size=500))
    copied = model.predict(spec_with(batch_size=500, strategy="ddp"), 2)
    assert copied.communication_bytes == 4 * count
    assert copied.total_bytes == alone.total_bytes + 4 * count
    for strategy in ("fsdp", "zero3"):
        two, eight = (model.predict(spec_with(batch_size=500, strategy=strategy), ranks) for ranks in (2, 8))
        assert two.params_bytes == 2 * count
        assert eight.params_bytes == count / 2
        assert eight.total_bytes < two.total_bytes < alone.total_bytes
    gathered = model.predict(spec_with(batch_size=500, strategy="fsdp", reshard="off"), 2)
    assert gathered.communication_bytes >= 4 * count
    parts = model.predict(spec_with(batch_size=500, strategy="zero2"), 4)
    assert parts.params_bytes == 4 * count
    assert parts.optimizer_bytes == 3 * count, "a quarter of the masters and of both moments"


def test_the_first_gpu_of_dp_has_the_loss_of_all() -> None:
    model, count = model_of(12), 12 * BLOCK + ROOT
    at_the_head, each = 12 * count, 8 + HEAD + HEAD
    for devices in (2, 3):
        found = model.predict(spec_with(batch_size=5000, strategy="dp", devices=devices))
        assert found.total_bytes == at_the_head + 5000 * (12 * KEPT_BY_BLOCK + devices * each)
        assert f"the first of {devices} GPUs" in found.fullest
        assert "rules for dp that no run has confirmed" in found.basis
    listed = model.predict(spec_with(batch_size=5000, strategy="dp", devices="0+2"))
    assert listed == model.predict(spec_with(batch_size=5000, strategy="dp", devices=2))


def test_the_gradients_of_copies_are_added_up_at_the_end() -> None:
    model, count = model_of(12), 12 * BLOCK + ROOT
    for micro_batches, times in ((1, 2), (2, 3)):
        found = model.predict(spec_with(batch_size=1, strategy="dp", devices=2, grad_accum=micro_batches))
        assert found.phases["forward_backward"]["grads"] == times * 4 * count


def test_a_strategy_that_cannot_be_predicted_says_why() -> None:
    with pytest.raises(UserError, match="naive-mp depends on the number of devices"):
        model_of(3).predict(spec_with(strategy="naive-mp"), 1)
    with pytest.raises(UserError, match="only for models with one stack of blocks"):
        model_of(3).predict(spec_with(strategy="naive-mp", devices=2), 1)


def test_a_trace_is_remembered_and_damage_is_none(tracer: Tracer, tmp_path: Path) -> None:
    spec = spec_with()
    assert cached_model(spec) is None
    model = tracing.trace_model(spec)
    assert "3 layers" in model.basis
    assert cached_model(spec) == model
    assert cached_model(spec_with(batch_size=99, grad_accum=3, strategy="ddp", precision="tf32")) == model
    assert cached_model(spec_with(seq_len=64)) is None
    assert cached_model(spec_with(strategy="zero2", precision="bf16")) is None
    assert len(tracer.asked) == 2
    for file in (tmp_path / "trainfast-tui" / "traced").glob("*.json"):
        file.write_bytes(file.read_bytes()[:100])
    assert cached_model(spec) is None
    assert tracing.trace_model(spec) == model
    assert cached_model(spec) == model


def test_many_questions_of_one_moment_read_the_disk_once_and_see_what_is_traced_meanwhile(
    tracer: Tracer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []
    stamps = tracing.training_python.install_stamps
    monkeypatch.setattr(
        tracing.training_python, "install_stamps", lambda python: looks.append(python) or stamps(python)
    )
    model_of_spec = cached_models()
    assert model_of_spec(spec_with()) is None
    model = tracing.trace_model(spec_with())
    looks.clear()
    assert model_of_spec(spec_with()) == model
    for file in (tmp_path / "trainfast-tui" / "traced").glob("*.json"):
        file.unlink()
    assert model_of_spec(spec_with(batch_size=99)) == model
    assert looks == []
    assert cached_models(python=str(tmp_path / "gone"))(spec_with()) is None


def test_a_knob_traces_only_the_part_that_depends_on_it(tracer: Tracer) -> None:
    tracing.trace_model(spec_with())
    tracer.asked.clear()
    tracing.trace_model(spec_with(checkpointing="full", seq_len=64, attention="eager"))
    assert [request["part"] for request in tracer.asked] == ["step"]
    tracer.asked.clear()
    tracing.trace_model(spec_with(optimizer="sgd"))
    assert [(request["part"], request["unused"]) for request in tracer.asked] == [("optimizer", ["pooler"])]
    tracer.asked.clear()
    tracing.trace_model(spec_with(precision="bf16"))
    assert [request["part"] for request in tracer.asked] == ["step"], "the weights are fp32 under autocast"


def test_what_several_have_in_common_is_traced_once(tracer: Tracer) -> None:
    specs = [spec_with(batch_size=4), spec_with(batch_size=8), spec_with(optimizer="sgd"), spec_with(precision="fp16")]
    heard: list[tuple[int, int]] = []
    found = list(tracing.trace_models(specs, on_traced=lambda now: heard.append((now.done, now.total))))
    assert [place for place, _ in found] == [0, 1, 2, 3]
    assert [request.get("after") for request in tracer.asked] == [None, 0, 0, None, 3]
    assert heard == [(done, 5) for done in range(6)]


def test_a_model_that_cannot_be_followed_says_why(tracer: Tracer) -> None:
    tracer.refusal = {"untraceable": "DynamicOutputShapeException: aten.nonzero"}
    with pytest.raises(UserError, match="nonzero"):
        tracing.trace_model(spec_with())
    tracer.refusal = {"error": {"message": "no such head", "key": "data.objective", "allowed": [], "nearest": None}}
    with pytest.raises(UserError, match="no such head"):
        tracing.trace_model(spec_with())
    assert cached_model(spec_with()) is None


def test_what_is_offloaded_is_the_hosts_on_a_gpu_and_the_process_on_a_cpu() -> None:
    here, count = model_of(12), 12 * BLOCK + ROOT
    on_gpu = msgspec.structs.replace(here, device="cuda")
    spec = spec_with(batch_size=500, strategy="zero2-offload")
    there = on_gpu.predict(spec, 4)
    assert (there.params_bytes, there.grads_bytes, there.optimizer_bytes) == (4 * count, 0, 0)
    assert there.total_bytes < on_gpu.predict(spec_with(batch_size=500, strategy="zero2"), 4).total_bytes
    both = here.predict(spec, 4)
    assert both.params_bytes == 4 * count + count, "the rank's part once more, on its way back"
    assert (both.grads_bytes, both.optimizer_bytes) == (count, 3 * count), "a quarter, in fp32, all the time"
    nothing = on_gpu.predict(spec_with(batch_size=500, strategy="zero3-offload"), 4)
    assert nothing.params_bytes + nothing.grads_bytes + nothing.optimizer_bytes == 0
    kept = here.predict(spec_with(batch_size=500, strategy="zero3-offload"), 4)
    assert kept.total_bytes > here.predict(spec_with(batch_size=500, strategy="zero3"), 4).total_bytes


def test_accumulation_on_the_host_has_a_copy_of_its_own() -> None:
    model, count = model_of(12), 12 * BLOCK + ROOT
    for precision, parts in (("fp32", 2), ("bf16-pure", 1)):
        spec = spec_with(batch_size=5000, grad_accum=2, strategy="zero2-offload", precision=precision)
        half = 2 if precision == "bf16-pure" else 1
        assert model.predict(spec, 4).grads_bytes == parts * count / half


EVERY_KNOB = {
    "precision": some.sampled_from(["fp32", "tf32", "fp16", "bf16", "bf16-pure"]),
    "optimizer": some.sampled_from(list(OPTIMIZERS)),
    "strategy": some.sampled_from(PREDICTED_STRATEGIES),
    "reshard": some.sampled_from(["on", "off"]),
    "grad_accum": some.integers(1, 5),
    "grad_clip": some.sampled_from([0.0, 1.0]),
    "batch_size": some.one_of(some.integers(1, 64), some.just(1 << 20)),
    "pp_schedule": some.sampled_from(["gpipe", "1f1b", "interleaved"]),
}


@given(
    knobs=some.fixed_dictionaries(EVERY_KNOB),
    ranks=some.sampled_from([2, 4, 8]),
    device=some.sampled_from(["cpu", "cuda"]),
    limit=some.integers(0, 1 << 21),
)
def test_parts_add_up_and_the_largest_batch_fits_with_every_knob(
    knobs: dict[str, Any], ranks: int, device: str, limit: int
) -> None:
    knobs |= {"devices": ranks, "pp_degree": 2, "micro_batches": 4, "tp_degree": 2}
    spec = spec_with(**knobs)
    stages = stage_count(spec.knobs) if knobs["strategy"] in STAGED_STRATEGIES else 1
    cut = [StageCut(at * 2, at * 2 + 2, 2 * BLOCK + ROOT * (at == stages - 1), BLOCK) for at in range(stages)]
    pipeline = PipelineCut(cut, 0, 5, 11)
    model = msgspec.structs.replace(model_of(2 * stages if stages > 1 else 12), device=device, pipeline=pipeline)
    found = model.predict(spec, ranks)
    parts = [found.category(name) for name in CATEGORIES]
    assert min(parts) >= 0
    assert sum(parts) == found.total_bytes == max(phase["total"] for phase in found.phases.values())
    most = model.max_batch(spec, ranks, limit)

    def total(batch: int) -> int:
        return model.predict(replace(spec, knobs={**spec.knobs, "batch_size": batch}), ranks).total_bytes

    step = 4 if knobs["strategy"] in PIPELINE_STRATEGIES else 1
    assert most == 0 or total(most) <= limit
    assert total(most + step) > limit


def test_zero_has_its_bucket_from_the_first_gradient_on() -> None:
    """DeepSpeed 0.19.8, stage_1_and_2.py: `process_gradients` allocates it, after the loss's backward began."""
    model = WholeModel(
        [BlockStack(3, [10] * 3)], 40, [160.0, 160.0, 320.0, 0.0, 0.0], on_gpu=True, largest_parameter=10
    )
    rule = memory_rule({**resolve("tiny-llama").knobs, "strategy": "zero2", "precision": "bf16"}, 1, model)
    loss = Moment((80.0, 0.0, 0.0, 50.0, 50.0), None, 1, True)
    in_last_block = Moment((80.0, 4.0, 0.0, 50.0, 50.0), BlockPosition(0, 2, True), 1, True)
    assert [rule.at(moment).communication for moment in (loss, in_last_block)] == [0, 80]


def test_a_single_rank_of_zero3_gathers_nothing() -> None:
    model = WholeModel(
        [BlockStack(3, [10] * 3)], 40, [160.0, 160.0, 320.0, 0.0, 0.0], on_gpu=True, largest_parameter=10
    )
    knobs = {**resolve("tiny-llama").knobs, "strategy": "zero3", "precision": "bf16"}
    loss = Moment((80.0, 0.0, 0.0, 50.0, 50.0), None, 1, True)
    part = 2 * 10
    assert [memory_rule(knobs, ranks, model).at(loss).communication for ranks in (1, 2)] == [part, 3 * part]
