"""From the course of a step to predictions: depth, batch, sharing, pipelines, and what is remembered."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some
from layered_model import BLOCK, HEAD, KEPT_BY_BLOCK, PASSING, ROOT, model_of, spec_with

from on_disk import run_file
from trainfast_runner.errors import UserError
from trainfast_runner.memory import timeline, tracing
from trainfast_runner.memory.headroom import with_prediction
from trainfast_runner.memory.pipeline import PipelineAction, schedule_actions, stage_count
from trainfast_runner.memory.sharding import PIPELINE_STRATEGIES, PREDICTED_STRATEGIES, STAGED_STRATEGIES, memory_rule
from trainfast_runner.memory.timeline import CATEGORIES, BlockStack, Moment, PipelineCut, StageCut, WholeModel
from trainfast_runner.memory.tracing import cached_model, cached_models
from trainfast_runner.records.run_directory import RunRecords
from trainfast_runner.records.run_file import Prediction
from trainfast_runner.results.summary import summarise
from trainfast_runner.results.verdict import Verdict
from trainfast_runner.settings.spec import resolve
from trainfast_runner.worker.catalog import OPTIMIZERS


@given(layers=some.integers(1, 200), batch=some.integers(1, 10_000))
def test_a_deep_model_is_its_blocks_and_its_head(layers, batch):
    predicted = model_of(layers).predict(spec_with(batch_size=batch))
    standing = 12 * (layers * BLOCK + ROOT)
    at_the_head = standing + batch * (8 + layers * KEPT_BY_BLOCK + HEAD + HEAD)
    last_block = standing + 4 * ROOT + 4 * BLOCK + batch * (8 + layers * KEPT_BY_BLOCK + PASSING)
    first_block = standing + 4 * ROOT + layers * 4 * BLOCK + batch * (8 + KEPT_BY_BLOCK + PASSING)
    assert predicted.phases["forward_backward"]["total"] == max(at_the_head, last_block, first_block)
    assert predicted.phases["optimizer"]["total"] == 20 * (layers * BLOCK + ROOT) + 8 * batch
    assert predicted.total_bytes == max(phase["total"] for phase in predicted.phases.values())
    assert sum(predicted.category(name) for name in CATEGORIES) == predicted.total_bytes


def test_gradients_live_through_later_micro_batches():
    model = model_of(12)
    once, twice, often = (model.predict(spec_with(batch_size=5000, grad_accum=count)) for count in (1, 2, 8))
    assert once.grads_bytes == 0, "the peak is before the first gradient"
    assert twice.grads_bytes == 4 * (12 * BLOCK + ROOT), "the second micro-batch's peak has all gradients beside it"
    assert often.total_bytes - twice.total_bytes == 6 * 5000 * 8, "only the batches themselves are more"


def test_what_a_strategy_shares():
    model, count = model_of(12), 12 * BLOCK + ROOT
    alone = model.predict(spec_with(batch_size=500))
    copied = model.predict(spec_with(batch_size=500, strategy="ddp"), 2)
    assert (copied.communication_bytes, copied.total_bytes) == (4 * count, alone.total_bytes + 4 * count)
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


def test_the_first_gpu_of_dp_has_the_loss_of_all_and_adds_up_the_gradients_of_copies():
    model, count = model_of(12), 12 * BLOCK + ROOT
    at_the_head, each = 12 * count, 8 + HEAD + HEAD
    for devices in (2, 3):
        found = model.predict(spec_with(batch_size=5000, strategy="dp", devices=devices))
        assert found.total_bytes == at_the_head + 5000 * (12 * KEPT_BY_BLOCK + devices * each)
        assert f"the first of {devices} GPUs" in found.fullest
        assert "rules for dp that no run has confirmed" in found.basis
    listed = model.predict(spec_with(batch_size=5000, strategy="dp", devices="0+2"))
    assert listed == model.predict(spec_with(batch_size=5000, strategy="dp", devices=2))
    for micro_batches, times in ((1, 2), (2, 3)):
        found = model.predict(spec_with(batch_size=1, strategy="dp", devices=2, grad_accum=micro_batches))
        assert found.phases["forward_backward"]["grads"] == times * 4 * count


def test_a_strategy_or_a_cut_that_cannot_be_predicted_says_why():
    with pytest.raises(UserError, match="naive-mp depends on the number of devices"):
        model_of(3).predict(spec_with(strategy="naive-mp"), 1)
    with pytest.raises(UserError, match="only for models with one stack of blocks"):
        model_of(3).predict(spec_with(strategy="naive-mp", devices=2), 1)
    with pytest.raises(UserError, match="pipeline memory"):
        staged(12, 2).predict(spec_with(strategy="pp", pp_degree=4), 4)


def test_a_trace_is_remembered_and_damage_is_none(tracer, tmp_path):
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


def test_many_questions_of_one_moment_read_the_disk_once_and_see_new_traces(tracer, tmp_path, monkeypatch):
    looks = []
    stamps = tracing.training_python.install_stamps
    monkeypatch.setattr(tracing.training_python, "install_stamps", lambda path: looks.append(path) or stamps(path))
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


def test_a_knob_traces_only_the_part_that_depends_on_it(tracer):
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


def test_what_several_have_in_common_is_traced_once(tracer):
    specs = [spec_with(batch_size=4), spec_with(batch_size=8), spec_with(optimizer="sgd"), spec_with(precision="fp16")]
    heard = []
    found = list(tracing.trace_models(specs, on_traced=lambda now: heard.append((now.done, now.total))))
    assert [place for place, _ in found] == [0, 1, 2, 3]
    assert [request.get("after") for request in tracer.asked] == [None, 0, 0, None, 3]
    assert heard == [(done, 5) for done in range(6)]


def test_a_model_that_cannot_be_followed_says_why(tracer):
    tracer.refusal = {"untraceable": "DynamicOutputShapeException: aten.nonzero"}
    with pytest.raises(UserError, match="nonzero"):
        tracing.trace_model(spec_with())
    tracer.refusal = {"error": {"message": "no such head", "key": "data.objective", "allowed": [], "nearest": None}}
    with pytest.raises(UserError, match="no such head"):
        tracing.trace_model(spec_with())
    assert cached_model(spec_with()) is None


def test_what_is_offloaded_is_the_hosts_on_a_gpu_and_the_process_on_a_cpu():
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
    model = here
    for precision, parts in (("fp32", 2), ("bf16-pure", 1)):
        spec = spec_with(batch_size=5000, grad_accum=2, strategy="zero2-offload", precision=precision)
        half = 2 if precision == "bf16-pure" else 1
        assert model.predict(spec, 4).grads_bytes == parts * count / half


SCHEDULES = ["gpipe", "1f1b", "interleaved"]
EVERY_KNOB = {
    "precision": some.sampled_from(["fp32", "tf32", "fp16", "bf16", "bf16-pure"]),
    "optimizer": some.sampled_from(list(OPTIMIZERS)),
    "strategy": some.sampled_from(PREDICTED_STRATEGIES),
    "reshard": some.sampled_from(["on", "off"]),
    "grad_accum": some.integers(1, 5),
    "grad_clip": some.sampled_from([0.0, 1.0]),
    "batch_size": some.one_of(some.integers(1, 64), some.just(1 << 20)),
    "pp_schedule": some.sampled_from(SCHEDULES),
}


@given(
    knobs=some.fixed_dictionaries(EVERY_KNOB),
    ranks=some.sampled_from([2, 4, 8]),
    device=some.sampled_from(["cpu", "cuda"]),
    limit=some.integers(0, 1 << 21),
)
def test_parts_add_up_and_the_largest_batch_fits_with_every_knob(knobs, ranks, device, limit):
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

    def total(batch):
        return model.predict(replace(spec, knobs={**spec.knobs, "batch_size": batch}), ranks).total_bytes

    step = 4 if knobs["strategy"] in PIPELINE_STRATEGIES else 1
    assert most % step == 0
    assert most == 0 or total(most) <= limit
    assert total(most + step) > limit


IN_BF16 = WholeModel(
    device="cuda", parameter_sizes=[10] * 4, stacks=[BlockStack(3, [10] * 3)], segments=[],
    before_optimizer=[160.0, 160.0, 320.0, *[0.0] * 4], optimizer_peak=[],
)  # fmt: skip
LOSS = Moment((80.0, 0.0, 0.0, 50.0, 50.0, 0.0, 0.0), "backward")


def test_zero_has_its_bucket_from_the_first_gradient_on_and_one_rank_gathers_nothing():
    """DeepSpeed 0.19.8, stage_1_and_2.py: `process_gradients` allocates it, after the loss's backward began."""
    rule = memory_rule({**resolve("tiny-llama").knobs, "strategy": "zero2", "precision": "bf16"}, 1, IN_BF16)
    in_last_block = Moment((80.0, 4.0, 0.0, 50.0, 50.0, 0.0, 0.0), "backward", timeline.BlockPosition(0, 2))
    assert [rule(moment).communication for moment in (LOSS, in_last_block)] == [0, 80]
    knobs = {**resolve("tiny-llama").knobs, "strategy": "zero3", "precision": "bf16"}
    part = 2 * 10
    assert [memory_rule(knobs, ranks, IN_BF16)(LOSS).communication for ranks in (1, 2)] == [part, 3 * part]


HIDDEN, OUTPUT = 5, 11
"""Elements a sample of what passes between stages, and of the logits."""


def staged(layers, stages):
    """`model_of` in equal stages, what is outside of its blocks being its head."""
    each = layers // stages
    cut = [StageCut(i * each, (i + 1) * each, each * BLOCK + ROOT * (i == stages - 1), BLOCK) for i in range(stages)]
    return msgspec.structs.replace(model_of(layers), pipeline=PipelineCut(cut, 0, HIDDEN, OUTPUT))


@given(schedule=some.sampled_from(SCHEDULES), degree=some.integers(2, 8), rounds=some.integers(1, 6))
def test_every_micro_batch_goes_forward_and_then_backward(schedule, degree, rounds):
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
def test_micro_batches_in_flight(schedule, most):
    for rank in range(4):
        flying = peak = 0
        for action in schedule_actions(schedule, rank, 4, 8):
            flying += -1 if action.backward else 1
            peak = max(peak, flying)
        assert peak == most[rank]


@given(each=some.integers(1, 40), parts=some.sampled_from([2, 4, 8]), size=some.integers(1, 500))
def test_gpipe_keeps_the_activations_of_all_micro_batches(each, parts, size):
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


def test_a_schedule_that_keeps_fewer_takes_less_and_a_tied_weight_is_on_both_ends():
    model = staged(48, 4)
    totals = {}
    for schedule in ("gpipe", "1f1b"):
        spec = spec_with(strategy="ddp+pp", pp_degree=4, pp_schedule=schedule, micro_batches=8, batch_size=8000)
        totals[schedule] = model.predict(spec, 8)
    assert totals["1f1b"].total_bytes < totals["gpipe"].total_bytes
    assert totals["1f1b"].fullest == "rank 0 of a pipeline of 4", "it has four micro-batches under way, the last one"
    model = staged(6, 2)
    cut = [StageCut(0, 3, 3 * BLOCK + ROOT, ROOT), StageCut(3, 6, 3 * BLOCK + ROOT, ROOT)]
    tied = msgspec.structs.replace(model, pipeline=PipelineCut(cut, ROOT, HIDDEN, OUTPUT))
    spec = spec_with(strategy="pp", pp_degree=2, pp_schedule="gpipe", micro_batches=2, batch_size=2)
    assert tied.predict(spec, 2).params_bytes == 4 * (3 * BLOCK + ROOT)


@given(each=some.integers(3, 40), size=some.integers(1000, 5000))
def test_layers_spread_over_two_gpus_have_the_whole_batch(each, size):
    model, spec = staged(2 * each, 2), spec_with(strategy="naive-mp", devices=2, batch_size=size)
    last = model.predict(spec)
    assert last.activations_bytes == size * (8 + each * KEPT_BY_BLOCK + HEAD)
    assert "GPU 2 of the 2" in last.fullest
    tied = msgspec.structs.replace(model, pipeline=msgspec.structs.replace(model.pipeline, head=0))
    assert "GPU 1 of the 2" in tied.predict(spec).fullest, "a tied head is where the embedding is"


def a_run(**fields):
    knobs = dict(spec_with(batch_size=5000).knobs)
    run = run_file(preset="tiny", knobs=knobs, python="/env/python")
    return msgspec.structs.replace(run, **fields)


def test_a_trace_that_landed_after_the_start_is_in_the_result(monkeypatch):
    asked = []

    def cached(spec, device, python):
        asked.append((spec, device, python))
        return model_of(12)

    monkeypatch.setattr(tracing, "cached_model", cached)
    found = with_prediction(RunRecords(run=a_run()))
    expected = model_of(12).predict(spec_with(batch_size=5000))
    assert found.run.predicted == expected, "traced bytes as well, which a calibration needs"
    assert [(device, python) for _, device, python in asked] == [("cpu", "/env/python")]
    result = summarise(Path("r1"), found, Verdict("finished", ""), 1)
    assert result.memory.predicted_bytes == expected.total_bytes


def test_a_prediction_before_the_start_stays_and_without_a_trace_or_with_unknown_knobs_there_is_none(monkeypatch):
    monkeypatch.setattr(tracing, "cached_model", lambda *_arguments: None)
    assert with_prediction(RunRecords(run=a_run())).run == a_run()
    assert with_prediction(RunRecords()).run is None
    monkeypatch.setattr(tracing, "cached_model", lambda *_arguments: model_of(12))
    strange = a_run(knobs={**a_run().knobs, "strategy": "something newer"})
    assert with_prediction(RunRecords(run=strange)).run == strange
    before = RunRecords(run=a_run(predicted=Prediction(total_bytes=7)))
    assert with_prediction(before) is before
