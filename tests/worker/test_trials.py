"""A warm process that tries settings: real processes under the real supervisor, ordered as a search orders them."""

import json
import math
import resource
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from worker_knobs import worker_knobs

from trainfast_runner.records.home import Home, conductor_lock
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_directory import read_records
from trainfast_runner.running import launch
from trainfast_runner.running.planning import plan_run
from trainfast_runner.running.present_state import running_ranks
from trainfast_runner.search.conductor import WarmProcess, end_run, wait_for_result
from trainfast_runner.search.searches import new_search
from trainfast_runner.settings.spec import resolve
from trainfast_runner.worker.catalog import allows_warm_trials
from trainfast_runner.worker.warm import trial_fields

SMALL = (
    *("data.kind=random", "model.hidden_size=64", "model.num_hidden_layers=2", "model.vocab_size=1024"),
    *("seq_len=64", "lr=1e-3", "model.attention_dropout=0.1"),
)
AS_FIRST = {
    "batch_size": 8, "grad_accum": 1, "workers": 0, "prefetch": 2, "checkpointing": "off", "optimizer": "adamw",
    "precision": "fp32", "attention": "sdpa",
}  # fmt: skip
FIRST_RAN = {
    "optimizer": "AdamW", "optimizer_implementation": "loop", "compute_dtype": "float32", "attention": "sdpa",
    "checkpointing": "off", "loader_workers_alive": 0,
}  # fmt: skip
TURNS = (
    ({}, {}), ({"optimizer": "sgd"}, {"optimizer": "SGD", "optimizer_implementation": None}),
    ({"optimizer": "adamw-fused"}, {"optimizer_implementation": "fused"}),
    ({"optimizer": "muon"}, {"optimizer": "MuonAdamW", "optimizer_implementation": None}),
    ({"precision": "bf16"}, {"compute_dtype": "bfloat16"}), ({"attention": "eager"}, {"attention": "eager"}),
    ({"checkpointing": "full"}, {"checkpointing": "full"}),
    ({"workers": 2, "prefetch": 1}, {"loader_workers_alive": 2}), ({"batch_size": 1, "grad_accum": 8}, {}),
    ({"precision": "tf32"}, {}), ({}, {}),
)  # fmt: skip
"""Turned knobs, and what of the live objects they change."""

Start = Callable[..., WarmProcess]
Train = Callable[..., tuple[Path, Result]]


@pytest.fixture
def home(tmp_path, cache, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return Home(tmp_path / "home")


@pytest.fixture
def start(home):
    """Start a process that tries settings, as the conductor of a search does, and wait until it is ready."""
    with ExitStack() as held:

        def started(*settings):
            home.create()
            search = new_search(home, "trials")
            assert held.enter_context(conductor_lock(search))
            plan = plan_run(resolve("tiny-llama", [*SMALL, *settings]))
            directory = launch.start(replace(plan, role="trial", search_id=search.name), home)
            held.callback(end_run, directory)
            process = WarmProcess(directory, plan.world_size, lambda: None)
            assert process.ready(), process.result
            return process

        yield started


@pytest.fixture
def train(home):
    """Train in a fresh process; returns the run's directory and result."""

    def trained(*settings, **knobs):
        asked = [*SMALL, *settings, *(f"{name}={value}" for name, value in knobs.items())]
        directory = launch.start(plan_run(resolve("tiny-llama", asked)), home)
        return directory, wait_for_result(directory, lambda: None)

    return trained


def turn(process, more=False, **knobs):
    answers = process.trial({**AS_FIRST, **knobs}, untimed=2, steps=3, more=more)
    assert answers is not None, process.result
    return answers


def what_ran(process, rank=0):
    """The `actual` records, one a trial."""
    name = "worker.jsonl" if rank == 0 else f"worker.rank{rank}.jsonl"
    lines = map(json.loads, (process.directory / name).read_text().splitlines())
    return [line for line in lines if line["kind"] == "actual"]


def check_every_turn(process, ranks):
    answers = [turn(process, **knobs) for knobs, _ in TURNS]
    for rank in range(ranks):
        ran = what_ran(process, rank)
        assert len(ran) == len(TURNS)
        for actual, (_, changed) in zip(ran, TURNS, strict=True):
            expected = {**FIRST_RAN, **changed}
            assert {name: actual[name] for name in expected} == expected
    for lines in answers:
        assert len(lines) == ranks
        for line in lines.values():
            assert (line.outcome, line.message, line.samples, line.tokens) == ("measured", None, 8, 8 * 64)
            assert len(line.step_ms) == len(line.losses) == 3
            assert line.peak_allocated_bytes == line.peak_reserved_bytes
            assert (line.peak_allocated_bytes or 0) > 1 << 20
    return answers


def first_losses(answers):
    return [loss for loss in answers[0].losses if loss is not None]


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "placed"),
    [pytest.param(1, ["devices=cpu"], marks=pytest.mark.ci), (2, ["strategy=ddp", "devices=cpu:2"])],
    ids=["one process", "two ranks of ddp"],
)
def test_each_warm_knob_is_turned_in_a_warm_process_and_trains_as_a_run_does(start, train, ranks, placed):
    process = start(*placed)
    answers = check_every_turn(process, ranks)
    further = turn(process, more=True)
    process.end()
    assert (process.result.state, process.result.role) == ("finished", "trial")
    assert len(read_records(process.directory).tried) == len(TURNS)

    directory, result = train(*placed, **AS_FIRST, steps=8, timing_warmup=2)
    losses = [step.loss for step in read_records(directory).steps[0] if step.loss is not None]
    cold = result.memory.peak_allocated_bytes
    for same in (answers[0], answers[-1]):
        assert first_losses(same) == pytest.approx(losses[2:5], abs=1e-6), "weights and data as in a fresh process"
        warm = max(line.peak_allocated_bytes for line in same.values())
        assert warm == pytest.approx(cold, rel=0.03, abs=4 << 20)
    assert first_losses(further) == pytest.approx(losses[5:8], abs=1e-6), "further steps of the same training"
    assert further[0].peak_allocated_bytes is None
    assert all(line.losses == further[0].losses for line in further.values())
    (accumulated,) = (lines for (knobs, _), lines in zip(TURNS, answers, strict=True) if knobs.get("grad_accum") == 8)
    assert accumulated[0].peak_allocated_bytes < (0.5 if ranks == 1 else 1) * cold, "nothing of larger batches counts"


@pytest.mark.ci
@pytest.mark.long
def test_the_rate_of_a_trial_does_not_fall_with_the_number_of_its_steps(start):
    process = start("devices=cpu", "lr_schedule=linear")
    in_two_orders = [*first_losses(turn(process)), *first_losses(turn(process, more=True))]
    answers = process.trial(AS_FIRST, untimed=2, steps=6, more=False)
    assert in_two_orders == pytest.approx(first_losses(answers), abs=1e-6)


@pytest.mark.ci
@pytest.mark.long
def test_a_trial_out_of_memory_ends_the_process_and_names_the_phase(start):
    process = start("devices=cpu")
    turn(process)
    (pid,) = (rank.pid for rank in running_ranks(process.directory))
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    (data,) = (int(line.split()[1]) << 10 for line in status if line.startswith("VmData:"))
    _, hard = resource.prlimit(pid, resource.RLIMIT_DATA)
    resource.prlimit(pid, resource.RLIMIT_DATA, (data + (256 << 20), hard))
    (line,) = turn(process, batch_size=4096).values()
    assert (line.outcome, line.phase, line.ended_process) == ("oom", "forward", True)
    assert "allocate" in (line.message or "")
    result = process.wait_for_end()
    assert (result.state, result.oom.batch_size, result.oom.changes) == ("oom", 4096, [])


@pytest.mark.long
def test_under_malloc_settings_of_the_users_own_no_memory_is_measured(start, monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    line = turn(start("devices=cpu"))[0]
    assert (line.outcome, line.peak_allocated_bytes, line.peak_reserved_bytes) == ("measured", None, None)


@pytest.mark.long
def test_a_strategy_that_is_not_turned_warm_tries_one_setting_a_process(start):
    assert not allows_warm_trials("zero2", "native", "off")
    process = start("strategy=zero2", "devices=cpu:2")
    assert {line.outcome for line in turn(process).values()} == {"measured"}
    process.end()
    assert process.result.state == "finished"


def a_step(step, warmup, loss=2.0, peak=None, tokens=64):
    memory = dict.fromkeys(("peak_allocated_bytes", "peak_reserved_bytes"), peak)
    return {
        "step": step, "warmup": warmup, "loss": loss, "step_ms": 10.0 * step, "data_ms": 1.0 * step,
        "optimizer_ms": 0.5 * step, "samples": 2, "tokens": tokens, **memory,
    }  # fmt: skip


def test_a_loss_that_is_not_finite_fails_its_trial_and_a_step_that_compiled_is_not_timed():
    fields = trial_fields([a_step(1, True), a_step(2, False, math.nan)], 100)
    assert (fields["outcome"], fields["loss_not_finite"]) == ("failed", True)
    assert fields["message"] == "the loss of step 2 is not finite"
    steps = [a_step(1, True, peak=7), a_step(2, True, peak=9), a_step(3, False, tokens=60), a_step(4, False, tokens=70)]
    fields = trial_fields(steps, tokens_per_sample=33)
    assert fields["step_ms"] == pytest.approx([30.0 * 66 / 60, 40.0 * 66 / 70]), "of 66 tokens, a mean step's"
    assert (fields["tokens"], fields["data_ms"], fields["peak_allocated_bytes"]) == (65, [3.0, 4.0], 9)
    before = worker_knobs(batch_size=2, a_knob_of_tomorrow=1, another=3)
    knobs = before.with_values({"batch_size": 8, "a_knob_of_tomorrow": 2})
    assert knobs == worker_knobs(batch_size=8, a_knob_of_tomorrow=2, another=3)
    assert (before.batch_size, before.others["a_knob_of_tomorrow"]) == (2, 1)
