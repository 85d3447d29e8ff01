"""ZeRO through DeepSpeed learns what one process learns, and says which stage ran."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from worker_knobs import llama

from trainfast_runner.machine.training_python import has_libaio, missing_tool
from trainfast_runner.worker.shared.host import states_folder

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")

LEARNING = {"steps": 10}
SHARED = {"ranks": 2, "batch_size": 2, "grad_accum": 2}
BUILD = "import sys, deepspeed.ops.op_builder as ops; getattr(ops, sys.argv[1])().load(verbose=False)"
# Wide enough that DeepSpeed finds its states worth writing: under 1 MiB they stay in memory.
WIDE = llama(hidden_size=512, intermediate_size=1024, num_hidden_layers=1)


def built(name, builder, environment):
    """Compile an extension before the run that is timed out; skips the test where that cannot be done."""
    missing = missing_tool(sys.executable)
    if missing is not None:
        pytest.skip(f"DeepSpeed's {name} is built with {missing[0]}, which is not here: {missing[1]}")
    if not (Path(environment["TORCH_EXTENSIONS_DIR"]) / name / f"{name}.so").exists():
        subprocess.run([sys.executable, "-c", BUILD, builder], env=environment, check=True, timeout=600)


@pytest.fixture(scope="module")
def cpu_adam(environment):
    """DeepSpeed's AdamW for offloaded states, compiled on a machine's first test run only."""
    built("cpu_adam", "CPUAdamBuilder", environment)


@pytest.fixture(scope="module")
def async_io(environment):
    """DeepSpeed's reads and writes of a disk."""
    if not has_libaio(sys.executable):
        pytest.skip("DeepSpeed's async_io is built with libaio, which is not here: apt-get install libaio-dev")
    built("async_io", "AsyncIOBuilder", environment)


@pytest.mark.parametrize(
    ("strategy", "stage", "settings", "optimizer"),
    [
        ("zero1", 1, {}, "AdamW"),
        ("zero2", 2, {"grad_clip": 0.1}, "AdamW"),
        ("zero3", 3, {}, "AdamW"),
        ("zero3-offload", 3, {"grad_clip": 0.1, "optimizer": "adamw-loop"}, "AdamW"),
    ],
)
@pytest.mark.ci
def test_every_stage_learns_what_one_process_learns(train, strategy, stage, settings, optimizer):
    clip = {name: value for name, value in settings.items() if name == "grad_clip"}
    check(train(**LEARNING, **clip), train(**LEARNING, **SHARED, strategy=strategy, **settings), stage, optimizer, clip)


@pytest.mark.usefixtures("cpu_adam")
def test_offloaded_states_step_with_deepspeeds_own_adamw(train):
    both = train(**LEARNING, **SHARED, strategy="zero2-offload")
    check(train(**LEARNING), both, 2, "DeepSpeedCPUAdam", {})
    offload = json.loads((both.folder / "deepspeed.json").read_text())["zero_optimization"]["offload_optimizer"]
    assert offload["device"] == "cpu"


@pytest.mark.ci
def test_torchs_adamw_in_place_of_deepspeeds_is_in_the_result(start, environment):
    folder, command = start(**SHARED, strategy="zero2-offload", steps=2)
    without_compiler = {**environment, "CXX": "no-such-compiler"}
    subprocess.run(command, env=without_compiler, cwd=folder, check=True, timeout=400)
    lines = [json.loads(line) for line in (folder / "worker.jsonl").read_text().splitlines()]
    actual = [line for line in lines if line["kind"] == "actual"][-1]
    assert actual["optimizer"] == "AdamW"
    assert actual["optimizer_reason"] == (
        "torch's AdamW instead of DeepSpeedCPUAdam, which is faster: no C++ compiler or no ninja on PATH"
    )


@pytest.mark.usefixtures("cpu_adam", "async_io")
def test_states_on_a_disk_are_the_same_states(train, tmp_path):
    short = {"model": WIDE, "steps": 4, "lr": 1e-3, "timing_warmup": 1}
    both = train(**short, ranks=2, batch_size=4, strategy="zero3-offload", offload_path=str(tmp_path))
    assert both.code == 0, both.stderr
    assert both.losses() == pytest.approx(train(**short).losses(), rel=1e-4)
    stage = json.loads((both.folder / "deepspeed.json").read_text())["zero_optimization"]
    assert stage["offload_optimizer"]["nvme_path"] == str(states_folder(tmp_path, both.folder))


def test_clipping_is_not_what_happens_anyway(train):
    free, clipped = train(**LEARNING).losses(), train(**LEARNING, grad_clip=0.1).losses()
    assert abs(clipped[-1] - free[-1]) > 2e-4 * free[-1]


def check(single, both, stage, optimizer, clip):
    """The same losses, on both ranks; the live objects; the configuration beside the records."""
    assert both.code == 0, both.stderr
    assert single.losses()[-1] < 0.9 * single.losses()[0]
    assert (both.losses(), both.losses(rank=1)) == (pytest.approx(single.losses(), rel=1e-4), both.losses())
    actual = both.record("actual", rank=1)
    assert (actual["wrapper"], actual["zero_stage"], actual["optimizer"]) == ("DeepSpeedEngine", stage, optimizer)
    assert (actual["param_dtype"], actual["reduce_dtype"], actual["compute_dtype"]) == ("float32",) * 3
    assert actual["parameters"] == single.record("actual")["parameters"]
    config = json.loads((both.folder / "deepspeed.json").read_text())
    assert (config["zero_optimization"]["stage"], config["gradient_clipping"]) == (stage, clip.get("grad_clip", 0.0))
    assert (config["train_batch_size"], config["gradient_accumulation_steps"]) == (8, 2)
