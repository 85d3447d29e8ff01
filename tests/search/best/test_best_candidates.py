"""The candidates of a best-fit search: one global batch, knobs that train the same, and refusals in words."""

import threading
from dataclasses import replace

import pytest
from benchmarks import best_fit_replay
from msgspec.structs import replace as replace_fields

from trainfast_runner.errors import UserError
from trainfast_runner.machine.devices import Machine
from trainfast_runner.records.tick import DeviceReading
from trainfast_runner.search.best import question
from trainfast_runner.search.best.decide import BestState
from trainfast_runner.search.best.question import MAX_CANDIDATES, Survey, enumerate_space, unneeded_levers, vary_of
from trainfast_runner.search.searches import candidate_spec
from trainfast_runner.settings.compatibility import Facts, check
from trainfast_runner.settings.knobs import KNOBS
from trainfast_runner.settings.spec import resolve

from .synthetic import trial

GPU = DeviceReading(index=0, uuid="GPU-0", name="H100", memory_free_bytes=79 << 30, compute_capability="9.0")
H100 = Machine(device="cuda", gpus=(GPU,), nvml_gpus=(GPU,), cores=16)
INSTALLED = dict.fromkeys(("torch", "transformers", "accelerate", "torchao", "liger-kernel"), "9.0")
CPU = Machine(device="cpu", gpus=(), nvml_gpus=(), cores=2, no_gpu_reason="no GPU")


def survey(*settings):
    """Tiny-llama with these settings on two cores, checked by the compatibility rules."""
    return Survey(resolve("tiny-llama", list(settings)), CPU, lambda spec: check(Facts(spec, CPU, {}, {}, "")))


def vary(**asked):
    return vary_of(survey(), {name: list(values) for name, values in asked.items()}, 32)[0]  # type: ignore[call-overload]


def test_the_candidates_are_the_combinations_of_one_global_batch():
    varied = vary(
        batch_size=["2", "4", "8", "16", "32"],
        grad_accum=["1", "2", "4", "8", "16"],
        precision=["fp32", "bf16"],
        optimizer=["adamw", "adamw-fused", "sgd"],
    )
    space = enumerate_space(survey(), varied, 32)
    assert (len(space.candidates), space.dropped) == (30, 120)
    assert all(one.knobs["batch_size"] * one.knobs["grad_accum"] == 32 for one in space.candidates)
    assert all(one.samples_per_step == 32 for one in space.candidates)
    baseline = space.candidates[space.baseline_number]
    assert baseline.knobs == {"batch_size": 8, "grad_accum": 4, "precision": "fp32", "optimizer": "adamw"}
    assert all(one.process_knobs == {} for one in space.candidates), "one process tries them all"
    sgd = next(one for one in space.candidates if one.knobs["optimizer"] == "sgd")
    assert question.changes_training(sgd, baseline) == ["optimizer"]


@pytest.mark.parametrize("name", ["batch_size", "grad_accum"])
def test_one_of_batch_and_accumulation_decides_the_other(name):
    space = enumerate_space(survey(), vary(**{name: [1, 2, 3, 4]}), 8)
    varied = [one.knobs[name] for one in space.candidates]
    assert varied == ([8, 1, 2, 4] if name == "batch_size" else [1, 2, 4]), "3 does not divide 8"
    assert all(one.knobs["batch_size"] * one.knobs["grad_accum"] == 8 for one in space.candidates)
    assert space.dropped == 1


def test_each_strategy_cuts_the_global_batch_by_its_own_degree():
    own = survey("devices=2", "strategy=ddp", "batch_size=4")
    assert question.default_global_batch(own) == 8
    varied = vary(strategy=["single", "ddp", "fsdp", "tp"])
    space = enumerate_space(own, varied, 8)
    sizes = {one.knobs["strategy"]: one.knobs["batch_size"] for one in space.candidates}
    assert sizes == {"single": 8, "ddp": 4, "fsdp": 4, "tp": 8}
    assert {one.knobs["strategy"]: one.world_size for one in space.candidates}["single"] == 1
    single = candidate_spec(own.spec, {"strategy": "single", "batch_size": 8})
    assert single.knobs["devices"] == 1, "devices is a ceiling, of which single uses one"
    assert space.candidates[0].excluded_as is None
    fsdp = next(one for one in space.candidates if one.knobs["strategy"] == "fsdp")
    assert fsdp.process_knobs == fsdp.knobs, "fsdp turns no knob in a running process"


def test_settings_that_exclude_each_other_are_candidates_and_a_compiled_process_tries_one():
    space = enumerate_space(survey(), vary(precision=["fp32", "tf32"]), None)
    [wrong] = [one for one in space.candidates if one.excluded_as]
    assert wrong.excluded_as == "incompatible"
    assert "precision=tf32" in wrong.reason
    assert "CPU" in wrong.reason
    refusal = UserError("no such device", advice="another device", option="--set devices=1")

    def refuse(spec):
        raise refusal

    space = enumerate_space(replace(survey(), check=refuse), {"lr": [0.1]}, None)
    assert {one.reason for one in space.candidates} == {"no such device; try another device"}
    space = enumerate_space(survey(), vary(compile=["off", "default"], batch_size=[4, 8]), 8)
    processes = {tuple(sorted(one.process_knobs.items())) for one in space.candidates}
    assert len(processes) == 3, "one for both settings without compile, one for each with it"


@pytest.mark.parametrize(
    ("settings", "varied", "size", "allowed", "nearest"),
    [
        ((), {"batch_size": [2, 4], "grad_accum": [1, 2]}, 7, ["4", "8"], "8"),
        # The ranks cannot share it.
        (("devices=2", "strategy=ddp"), {"precision": ["fp32", "bf16"]}, 7, ["6", "8"], "6"),
        # Nothing varies the batch: any multiple of the degree.
        (("devices=2", "strategy=ddp", "batch_size=8"), {"strategy": ["ddp"]}, 9, ["8", "10"], "8"),
    ],
)
def test_an_impossible_global_batch_gets_the_nearest_possible(settings, varied, size, allowed, nearest):
    with pytest.raises(UserError) as refused:
        enumerate_space(survey(*settings), vary(**varied), size)
    assert (refused.value.allowed, refused.value.nearest) == (allowed, nearest)


def test_a_million_points_are_refused_with_the_count_before_anything_is_listed():
    many = {
        "lr": [step / 1e6 for step in range(1, 101)],
        "seed": list(range(100)),
        "weight_decay": [step / 1000 for step in range(100)],
    }
    assert question.GlobalBatch(survey(), many, 8).count == 1_000_000
    with pytest.raises(UserError) as refused:
        enumerate_space(survey(), many, 8)
    assert "1,000,000 candidates are more than 5,000" in refused.value.message
    assert "without lr and seed there are about 100" in refused.value.message


def test_without_asking_only_knobs_that_train_the_same_are_varied():
    varied, left_alone = vary_of(survey(), {}, question.default_global_batch(survey()))
    assert varied["batch_size"] == [1, 2, 4, 8]
    assert sorted(varied["grad_accum"]) == [1, 2, 4, 8], "no value that no candidate has"
    assert varied["precision"] == ["fp32", "bf16"]
    assert set(varied) >= {"checkpointing", "optimizer", "compile"}
    assert "seq_len" not in varied
    assert "trains differently" in left_alone["seq_len"]
    assert "NVIDIA" in left_alone["precision=tf32"]
    assert "bf16 runs here" in left_alone["precision=fp16"]
    assert "strategy" not in varied, "the run has one device"
    space = enumerate_space(survey(), varied, 8)
    baseline = space.candidates[space.baseline_number]
    assert all(question.changes_training(one, baseline) == [] for one in space.candidates)


def test_an_optimizer_of_another_kind_is_left_alone_and_strategies_vary_on_several_devices():
    own = survey("optimizer=sgd")
    varied, left_alone = vary_of(own, {}, 8)
    assert "optimizer" not in varied
    assert left_alone["optimizer"] == "sgd trains differently from its other values"
    without = [entry for entry in KNOBS if entry.name != "pin_memory"]
    _, left_alone = vary_of(survey(), {}, 8, without)
    assert "pin_memory" not in left_alone
    _, left_alone = vary_of(survey(), {}, 8)
    assert left_alone["pin_memory"] == "a run on the CPU copies nothing to a GPU"
    own = survey("devices=2", "strategy=ddp")
    varied, _ = vary_of(own, {}, 16)
    assert set(varied["strategy"]) >= {"single", "ddp", "fsdp"}


@pytest.mark.parametrize("name", ["steps", "devices", "memory_limit"])
def test_a_knob_that_decides_no_speed_cannot_be_varied(name):
    with pytest.raises(UserError) as refused:
        vary(**{name: ["1"]})
    assert refused.value.key == name


def on_an_h100(preset):
    config = {"model_type": "llama", "vocab_size": 4096}
    spec = resolve(preset, [])
    return Survey(spec, H100, lambda run: check(Facts(run, H100, config, INSTALLED, "")))


@pytest.mark.parametrize("preset", ["tiny-llama", "llama-1b"])
def test_all_levers_of_a_gpu_are_varied_within_the_limit(preset):
    own = on_an_h100(preset)
    varied, left_alone = vary_of(own, {}, 8)
    assert set(varied) >= {"loss", "checkpointing", "compile", "attention", "kernels", "optimizer", "workers"}
    assert "--vary allocator=" in left_alone["allocator"]
    assert not [name for name, reason in left_alone.items() if f"{MAX_CANDIDATES:,}" in reason]
    assert question.GlobalBatch(own, varied, 8).count > 10 * MAX_CANDIDATES
    space = enumerate_space(own, varied, 8, in_stages=True)
    assert len(space.candidates) < MAX_CANDIDATES / 5
    baseline = space.candidates[space.baseline_number]
    differences = [
        [name for name, value in question.lever_point(one.knobs).items() if value != baseline.knobs[name]]
        for one in space.candidates
    ]
    assert max(map(len, differences)) == 1
    assert {name for names in differences for name in names} == {*question.lever_point(baseline.knobs)}
    assert len({(*one.knobs.items(),) for one in space.candidates}) == len(space.candidates)


def best_plan_of(own, batch):
    vary, left_alone = vary_of(own, {}, batch)
    space = enumerate_space(own, vary, batch, in_stages=True)
    asked = replace_fields(
        best_fit_replay.question("tiny-llama", space), vary=vary, left_alone=left_alone, is_default_vary=True
    )
    return question.BestPlan(asked, own, None, space)  # type: ignore[arg-type]  # nothing runs


def test_combinations_of_levers_enter_around_the_one_that_won_alone():
    plan = best_plan_of(on_an_h100("tiny-llama"), 8)
    space = plan.space
    baseline = space.candidates[space.baseline_number].knobs
    won = baseline | {"compile": "default"}
    number = [one.knobs for one in space.candidates].index(won)
    grown = plan.grow(threading.Event(), space, number)
    assert grown.candidates[: len(space.candidates)] == space.candidates, "numbers stay"
    assert grown.around == [space.baseline_number, number]
    assert len(space.candidates) < len(grown.candidates) < MAX_CANDIDATES
    added = [one.knobs for one in grown.candidates[len(space.candidates) :]]
    assert all(knobs["compile"] == "default" for knobs in added if knobs["kernels"] == "liger")
    assert won | {"kernels": "liger"} in added
    assert baseline | {"kernels": "liger", "attention": "eager"} not in added
    again = plan.grow(threading.Event(), grown, number)
    assert len(again.candidates) == len(grown.candidates)


def test_a_space_of_stages_grows_around_a_new_leader_and_around_what_needs_least():
    plan = best_plan_of(on_an_h100("tiny-llama"), 8)
    space = plan.space
    base = space.baseline_number
    knobs = space.candidates[base].knobs
    numbers = [one.knobs for one in space.candidates]
    won, smaller = (numbers.index(knobs | one) for one in ({"compile": "default"}, {"batch_size": 4, "grad_accum": 2}))

    def center(*lines, space=space):
        return BestState([plan.question, space, *lines], 0.0).next_center

    assert center() is None
    assert center(trial(base)) is None
    assert center(trial(base), trial(smaller, ms=50.0)) is None, "only the batch is another"
    assert center(trial(base), trial(won, ms=50.0)) == won
    done = replace_fields(space, around=[base, won])
    assert center(trial(base), trial(won, ms=50.0), space=done) is None
    all_too_large = [
        replace_fields(one, excluded_as="too_large", excess_bytes=1000 - number)
        for number, one in enumerate(space.candidates)
    ]
    nothing_fits = replace_fields(space, candidates=all_too_large)
    assert center(space=nothing_fits) == len(all_too_large) - 1


def test_a_lever_that_saves_memory_is_bound_where_the_same_setting_fits_without_it():
    plan = best_plan_of(survey(), 8)
    assert plan.space.around == [], "these few candidates are all combinations"
    fits = [
        replace_fields(one, excess_bytes=1) if one.batch_size == 8 and one.knobs["loss"] == "full" else one
        for one in plan.space.candidates
    ]
    unneeded = unneeded_levers(plan.question, fits)
    needed = {
        (one.knobs["batch_size"], one.knobs["checkpointing"], one.knobs["loss"])
        for number, one in enumerate(fits)
        if number not in unneeded
    }
    every = {"off", "full", "every-2"}
    assert needed == {(size, "off", "full") for size in (1, 2, 4, 8)} | {(8, "off", "chunked")} | {
        (8, value, "full") for value in every
    }
    assert "checkpointing=full saves memory alone" in " ".join(unneeded.values())
    unpredicted = [replace_fields(one, predicted_bytes=None) for one in fits]
    unknown = unneeded_levers(plan.question, unpredicted)
    assert unknown.keys() == unneeded.keys()
    assert "loss=chunked saves memory alone, and nothing says that loss=full is too large" in unknown.values()
    assert unneeded_levers(replace_fields(plan.question, is_default_vary=False), fits) == {}
