"""One process: what it records, and that the knobs do what they say."""

import itertools
import json
import signal
import subprocess
import time

import pytest
from worker_knobs import llama

# One process of the test run makes the trainings that several of these tests look at.
pytestmark = pytest.mark.xdist_group("one-process")


def test_every_step_is_on_record_with_phases_that_add_up(train):
    run = train(steps=20)
    assert run.code == 0, run.stderr
    steps = run.steps()
    assert [step["step"] for step in steps] == list(range(1, 21))
    assert [step["warmup"] for step in steps] == [True] * 2 + [False] * 18
    for step in steps:
        phases = sum(step[f"{name}_ms"] for name in ("data", "forward", "backward", "optimizer", "other"))
        assert phases == pytest.approx(step["step_ms"], abs=1e-6)
        assert min(step["forward_ms"], step["backward_ms"], step["optimizer_ms"]) > 0
        assert (step["samples"], step["tokens"]) == (8, 256)
        if step["warmup"]:
            assert step["peak_allocated_bytes"] == step["peak_reserved_bytes"] == max(step["phase_peaks"].values()) > 0
        else:
            assert step["peak_allocated_bytes"] is step["peak_reserved_bytes"] is step["phase_peaks"] is None
        assert step["alloc_retries"] == 0
    for before, after in itertools.pairwise(steps):
        assert after["t_ns"] - before["t_ns"] == pytest.approx(after["step_ms"] * 1e6, abs=1000)


@pytest.mark.ci
@pytest.mark.long
def test_it_learns_the_standard_library(train):
    run = train(data={"kind": "text"}, steps=20)
    assert run.code == 0, run.stderr
    losses = run.losses()
    assert losses[0] == pytest.approx(6.93, abs=0.15)  # log of the vocabulary
    assert losses[-1] < losses[0] - 1.0
    data = run.record("data")
    assert (data["data_kind"], data["synthetic"]) == ("text", False)
    assert "standard library" in data["source"]


def test_what_ran_is_read_from_the_live_objects(train):
    run = train(steps=20)
    assert run.record("started")["world_size"] == 1
    actual = run.record("actual")
    expected = {
        "wrapper": "none", "optimizer": "AdamW", "optimizer_implementation": "loop", "param_dtype": "float32",
        "compute_dtype": "float32", "reduce_dtype": None, "attention": "sdpa", "world_size": 1, "device": "cpu",
        "compiled": False, "layers": 2, "hidden_size": 64, "vocab_size": 1024,
    }  # fmt: skip
    assert {name: actual[name] for name in expected} == expected
    multiplied = actual["parameters"] - 1024 * 64
    assert actual["model_flops_per_sample"] == 32 * (6 * multiplied + 6 * 2 * 64 * 2 * 32)
    assert run.record("finished")["steps"] == 20


@pytest.mark.parametrize(
    "objective",
    [pytest.param("causal-lm", marks=pytest.mark.long), pytest.param("masked-lm", marks=pytest.mark.longest)],
)
def test_accumulation_equals_a_larger_batch(train, objective):
    model = {"causal-lm": "llama", "masked-lm": "bert"}[objective]
    whole = train(model=model, data={"objective": objective})
    parts = train(model=model, data={"objective": objective}, batch_size=2, grad_accum=4)
    assert (parts.losses(), parts.steps()[0]["samples"]) == (pytest.approx(whole.losses(), abs=1e-4), 8)


@pytest.mark.long
def test_checkpointing_changes_memory_not_losses(train):
    common = {"model": llama(num_hidden_layers=6), "batch_size": 32, "steps": 3}
    plain, checkpointed = (train(cold=True, **common, checkpointing=how) for how in ("off", "full"))
    assert checkpointed.losses() == pytest.approx(plain.losses(), abs=1e-4)
    assert checkpointed.record("actual")["checkpointing"] == "full"
    peaks = [run.steps()[1]["phase_peaks"]["forward_backward"] for run in (plain, checkpointed)]
    assert peaks[1] < 0.8 * peaks[0]


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        pytest.param(
            {"precision": "bf16", "optimizer": "adamw-8bit"},
            {"optimizer": "AdamW8bit", "param_dtype": "float32", "compute_dtype": "bfloat16"},
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"precision": "bf16-pure", "optimizer": "adafactor", "attention": "eager"},
            {"optimizer": "Adafactor", "param_dtype": "bfloat16", "compute_dtype": "bfloat16", "attention": "eager"},
            marks=pytest.mark.long,
        ),
        (
            {"optimizer": "adamw-fused", "workers": 2, "prefetch": 3, "grad_clip": 1.0, "lr_schedule": "linear"},
            {"optimizer": "AdamW", "optimizer_implementation": "fused", "loader_workers_alive": 2},
        ),
        pytest.param(
            {"precision": "fp16", "optimizer": "adamw-foreach", "grad_clip": 1.0},
            {"optimizer_implementation": "foreach", "param_dtype": "float32", "compute_dtype": "float16"},
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"precision": "tf32", "optimizer": "sgd", "lr": 0.1}, {"optimizer": "SGD"}, marks=pytest.mark.long
        ),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_knobs_run_as_asked(train, knobs, expected):
    run = train(**knobs)
    assert run.code == 0, run.stderr
    actual = run.record("actual")
    assert {name: actual[name] for name in expected} == expected
    losses = run.losses()
    assert len(losses) == 6
    assert losses[-1] < losses[0]


def test_the_rate_falls_linearly_and_clipping_changes_the_path(train):
    run = train(optimizer="adamw-fused", workers=2, prefetch=3, grad_clip=1.0, lr_schedule="linear")
    assert [step["lr"] for step in run.steps()] == pytest.approx([5e-3 * (6 - t) / 6 for t in range(6)])


@pytest.mark.long
def test_fp16_records_its_scale_and_the_steps_it_skipped(train):
    run = train(precision="fp16", optimizer="adamw-foreach", grad_clip=1.0)
    scales = [step["loss_scale"] for step in run.steps()]
    skipped = {record["step"]: record["scale"] for record in run.records("overflow")}
    fell = {n + 1: now for n, now in enumerate(scales) if now < (scales[n - 1] if n else 65536.0)}
    assert skipped == fell


@pytest.mark.long
def test_the_users_files_and_a_local_model_directory(train, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 700, "n_positions": 64}
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))
    texts = [folder / "a.txt", folder / "b.txt"]
    for number, path in enumerate(texts):
        path.write_text(" ".join(f"the {n * (number + 3) % 97} quick foxes" for n in range(3000)))
    run = train(
        model={"path": str(folder), "num_hidden_layers": 2},
        data={"kind": "files", "paths": [str(path) for path in texts]},
        steps=4,
    )
    assert run.code == 0, run.stderr
    assert run.record("data")["source"] == "2 text files"
    actual = run.record("actual")
    assert (actual["layers"], actual["hidden_size"], actual["model_type"]) == (2, 64, "gpt2")


@pytest.mark.long
def test_sigterm_leaves_every_finished_step_on_record(start, environment):
    folder, command = start(steps=100_000, data={"kind": "random"}, workers=1)
    steps = folder / "steps.jsonl"
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 180
        while not (steps.exists() and steps.read_bytes().count(b"\n") > 5) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 143
    text = [json.loads(line) for line in (folder / "worker.jsonl").read_text().splitlines()]
    assert text[-1]["kind"] == "signal"
    written = [json.loads(line)["step"] for line in steps.read_text().splitlines()]
    assert written == list(range(1, text[-1]["step"]))
