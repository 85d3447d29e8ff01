"""A step without memory: three blocks stand for all, and the live bytes agree with torch's own tracker."""

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode
from worker_knobs import knob_values, llama, trace_uncached

from trainfast_runner.memory.model import StepWork, step_work
from trainfast_runner.memory.tracing import request_fields
from trainfast_runner.settings.spec import resolve
from trainfast_runner.worker.catalog import OPTIMIZERS
from trainfast_runner.worker.memory_trace import answers, step_timeline
from trainfast_runner.worker.memory_trace.envelope import TracedStack, envelope, extrapolate_blocks, shorten
from trainfast_runner.worker.memory_trace.live_bytes import LiveBytes, TracedSegment
from trainfast_runner.worker.memory_trace.step_timeline import choose_foreach, read_request, trace_optimizer
from trainfast_runner.worker.shared.words import GRADS, OPTIMIZER, PARAMS, TEMPORARY

TINY = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
SMALL_T5 = ["model.d_model=64", "model.d_ff=128", "model.d_kv=16", "model.num_heads=4", "seq_len=64"]
CASES = [
    ("tiny-llama", ["model.num_hidden_layers=9", "precision=bf16", "checkpointing=full", "grad_accum=2"]),
    ("t5-base", SMALL_T5),
    ("tiny-llama", ["model.num_hidden_layers=9", "checkpointing=every-2", "grad_accum=2"]),
    ("tiny-llama", ["model.num_hidden_layers=12", "checkpointing=every-3", "loss=chunked"]),
]


@pytest.mark.longest
@pytest.mark.parametrize(("preset", "settings"), CASES)
def test_a_few_blocks_predict_the_whole_depth(preset, settings):
    spec = resolve(preset, settings)
    model, whole = trace_uncached(spec), trace_uncached(spec, whole=True)
    assert "layers traced" in model.basis
    assert "whole" in whole.basis
    for batch in (1, 3, 40):
        here = resolve(preset, [*settings, f"batch_size={batch}"])
        assert model.predict(here).phases == whole.predict(here).phases


def test_packages_that_a_trace_does_without_stay_hidden_from_transformers(tmp_path, monkeypatch):
    """transformers asks an installed torchvision for its version while it imports a model of images."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    about = tmp_path / "torchvision-0.28.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    sizes = ("hidden_size=32", "intermediate_size=64", "num_attention_heads=4", "num_hidden_layers=1", "image_size=32")
    spec = resolve("vit-large", [f"model.{size}" for size in sizes])
    assert trace_uncached(spec).predict(spec).total_bytes > 0


def test_live_bytes_are_those_of_torchs_tracker():
    def step(model):
        model(torch.randn(8, 64)).square().sum().backward()

    def build():
        return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64))

    with FakeTensorMode():
        model, tracker = build(), MemTracker()
        tracker.track_external(model)
        with tracker:
            step(model)
        peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
        model, live = build(), LiveBytes("cpu")
        live.count_all(model.parameters(), PARAMS)
        with live:
            live.begin("forward", 1, "")
            step(model)
            live.end()
    assert max(sum(point) for point in live.segments[0].points) == peak


@pytest.mark.parametrize(("channels", "backward_copies"), [(4, 4 + 8), (3, 8)])
def test_a_convolution_on_a_cpu_copies_what_it_reads_and_writes(channels, backward_copies):
    """Measured, 64 to 256 channels, 12 and 49 MiB: 48.8 MiB beside the output, and 61.1 beside the gradients."""
    plane = 2 * 16 * 16 * 4
    with FakeTensorMode():
        convolution, live = nn.Conv2d(channels, 8, 3, padding=1, bias=False), LiveBytes("cpu")
        pixels = torch.randn(2, channels, 16, 16, requires_grad=True)
        with live:
            live.begin("forward", 1, "")
            output = convolution(pixels)
            live.begin("backward", 1, "")
            grads = torch.autograd.grad(output, [pixels, convolution.weight], torch.empty_like(output))
            live.end()
        assert len(grads) == 2
    forward, backward = (max(point[TEMPORARY] for point in segment.points) for segment in live.segments)
    assert (forward, backward) == (8 * plane, backward_copies * plane)


def test_only_lines_that_can_be_the_peak_are_kept():
    def line(fixed, each):
        return (fixed, 0.0), (each, 0.0)

    flat, middle, steep, below = line(100, 1), line(90, 5), line(0, 20), line(10, 4)
    kept = envelope([steep, below, flat, middle])
    assert kept == [flat, middle, steep]
    for batch in range(1, 50):
        highest = max(one[0][0] + batch * one[1][0] for one in (flat, middle, steep, below))
        assert max(one[0][0] + batch * one[1][0] for one in kept) == highest


def test_without_forks_requests_are_traced_in_turn(monkeypatch):
    monkeypatch.setattr(answers, "_pool_for", lambda _requests: ThreadPoolExecutor(1))
    model = llama(vocab_size=64, num_hidden_layers=9, **TINY)
    asked = {"model": model, "objective": "causal-lm", "device": "cpu"}
    requests = [
        {**asked, "part": "optimizer", "after": 1, "knobs": knob_values(attention="eager")},
        {**asked, "part": "step", "knobs": knob_values(seq_len=8)},
        {**asked, "part": "step", "knobs": knob_values(seq_len=8), "model": {**model, "vocab_size": 0}},
    ]
    found = dict(answers._trace_all([read_request(fields) for fields in requests]))
    assert found[1]["stacks"][0]["kept"] == 3
    whole = sum(found[1]["parameter_sizes"])
    assert found[0]["before_optimizer"][:2] == [4 * whole + 4 * 8, 4 * whole], "weights and rotary table; gradients"
    assert found[2]["error"]["message"] == "vocab_size=0: a size of llama is at least 1"


@pytest.mark.parametrize("at_once", [True, False])
def test_the_optimizer_step_of_a_few_blocks_predicts_that_of_all(at_once):
    """Blocks of 10 bytes of weights and 5 of a table; a foreach takes room for all, a loop for one after another."""

    def step(blocks):
        standing = 10 * blocks + 5
        scratch = [5, 10 * blocks] if at_once else [5, *[10] * blocks]
        return TracedSegment("optimizer", 0, "", (standing, 0), points=[(standing, one) for one in scratch])

    start, peak = extrapolate_blocks(step(3), step(4), extra_blocks=20)
    assert start == list(step(23).start)
    assert peak == list(max(step(23).points, key=sum))


@pytest.mark.parametrize("name", [entry.name for entry in OPTIMIZERS.values() if not entry.needs_gpus_reason])
def test_the_step_of_every_optimizer_finds_the_states_that_its_entry_says(name):
    entry = OPTIMIZERS[name]
    if entry.package:
        pytest.importorskip(entry.package)
    knobs = knob_values(optimizer=name, attention="eager")
    about = {
        "part": "optimizer",
        "model": llama(vocab_size=64, num_hidden_layers=1, **TINY),
        "objective": "causal-lm",
        "device": "cpu",
    }
    standing = trace_optimizer(read_request({**about, "knobs": knobs, "unused": []}), 0)["segment"].start
    if entry.state_bytes is None:  # its small states are not quantized
        assert standing[OPTIMIZER] // standing[GRADS] == entry.state_tensors


def test_what_is_offloaded_has_no_states_on_the_device():
    about = {"part": "optimizer", "model": llama(num_hidden_layers=1), "objective": "causal-lm", "device": "cpu"}
    knobs = knob_values(optimizer="adamw-offload")
    segment = trace_optimizer(read_request({**about, "knobs": knobs, "unused": []}), 0)["segment"]
    vectors = 3 * llama()["hidden_size"]
    assert segment.start[OPTIMIZER] == pytest.approx(2 * 4 * vectors, abs=3 * 4), "moments, and three counts of steps"
    assert all(point[TEMPORARY] == 0 for point in segment.points)


@pytest.mark.parametrize(("weight_decay", "copies"), [(0.0, 0), (0.01, 1)])
def test_sgd_with_weight_decay_copies_all_gradients_on_a_gpu(weight_decay, copies, monkeypatch):
    """torch/optim/sgd.py, _multi_tensor_sgd: `torch._foreach_add(grads, params, alpha=weight_decay)`."""
    monkeypatch.setattr(step_timeline, "choose_foreach", lambda optimizer, _: choose_foreach(optimizer, "cuda"))
    settings = ["model.num_hidden_layers=2", "optimizer=sgd", f"weight_decay={weight_decay}"]
    _, fields = request_fields(resolve("tiny-llama", settings), "cpu")
    knobs = knob_values(**fields["knobs"])
    segment = trace_optimizer(read_request({**fields, "knobs": knobs, "unused": []}), 0)["segment"]
    vectors = 4 * 192 * (2 * 2 + 1)
    copied = max(point[TEMPORARY] for point in [segment.start, *segment.points])
    assert copied == copies * (segment.start[GRADS] - vectors)


WIDE = ("model.hidden_size=384", "model.intermediate_size=1024", "model.num_hidden_layers=6", "model.vocab_size=512")
IN_BLOCKS = (*WIDE, "batch_size=2")
"""A step whose peak is in the blocks' backward, not in the loss."""


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.parametrize("settings", [(), IN_BLOCKS], ids=["loss", "blocks"])
@pytest.mark.parametrize("strategy", ["fsdp", "zero2", "zero3"])
def test_a_rank_takes_the_predicted_bytes(strategy, settings):
    """A GPU's allocator peaked within 0.1 % of these counts, for fsdp, zero2 and zero3 of tiny-llama."""
    chosen = [*settings, f"strategy={strategy}", "precision=bf16", "devices=cpu:1"]
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    group = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("counted_rank.py")), "tiny-llama", *chosen],
        capture_output=True,
        text=True,
        env={**os.environ, **group, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
    )
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout.splitlines()[-1])
    spec = resolve("tiny-llama", chosen)
    predicted = trace_uncached(spec).predict(spec, 1).phases
    assert predicted["forward_backward"]["total"] == pytest.approx(max(peaks["forward"], peaks["backward"]), rel=0.03)
    assert predicted["optimizer"]["total"] == pytest.approx(peaks["optimizer"], rel=0.03)


def test_blocks_that_differ_are_all_kept_and_a_parameter_of_a_repeated_one_stands_for_all():
    class Config:
        def to_dict(self):
            return {}

    def stack(widths):
        return nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, width) for width in widths)})

    alike = stack([4] * 6)
    (found,) = shorten(alike, Config(), whole=False)
    assert (len(found.blocks), found.repeats, found.sizes) == (3, 4, (20,) * 6)
    (found,) = shorten(stack([4, 4, 8, 4, 4]), Config(), whole=False)
    assert (len(found.blocks), found.repeats) == (5, 1)
    (found,) = shorten(stack([8, 4, 4, 4, 4]), Config(), whole=False)
    assert len(found.blocks) == 3, "the first alone may differ"
    traced = TracedStack("h", (nn.Linear(1, 1),) * 3, (2,) * 6)
    assert traced.whole_model_names("head.weight") == ["head.weight"]
    assert traced.whole_model_names("h.0.bias") == ["h.0.bias"]
    assert traced.whole_model_names("h.1.bias") == [f"h.{place}.bias" for place in (1, 2, 3, 4)]
    assert traced.whole_model_names("h.2.bias") == ["h.5.bias"]


def test_the_workspaces_of_a_gpus_library_are_those_that_torch_makes(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert step_timeline.library_bytes("cpu") == 0
    for capability, kib in (((9, 0), 2 * 32 * 1024), ((8, 0), 2 * 8320)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda one=capability: one)
        assert step_timeline.library_bytes("cuda") == kib * 1024
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert step_timeline.library_bytes("cuda") == 2 * 4096 * 8 * 1024


@pytest.mark.long
def test_recomputed_activations_are_activations(train):
    """With checkpointing, the peak is in the backward of one block, which has computed its activations again."""
    width = ["model.vocab_size=512", "seq_len=256", "batch_size=16"]

    def predicted(*settings):
        spec = resolve("tiny-llama", [*width, *settings])
        return trace_uncached(spec).predict(spec)

    spec = resolve("tiny-llama", [*width, "checkpointing=full"])
    deep, deeper_by_one = (predicted(f"model.num_hidden_layers={layers}") for layers in (4, 5))
    one_block = deeper_by_one.activations_bytes - deep.activations_bytes
    boundaries = 4 * 4 * 16 * 256 * spec.model["hidden_size"]
    with_checkpointing = predicted("checkpointing=full")
    assert with_checkpointing.activations_bytes - boundaries > 0.75 * one_block
    assert with_checkpointing.activations_bytes - boundaries < 1.25 * one_block
    assert with_checkpointing.temporary_bytes < 0.5 * one_block

    knobs = {name: spec.knobs[name] for name in ("seq_len", "batch_size", "checkpointing")}
    run = train(cold=True, model=spec.model, data=spec.data, steps=3, **knobs)
    # Memory is measured in the steps that are not timed.
    measured = max(step["peak_allocated_bytes"] for step in run.steps() if step["warmup"])
    assert measured == pytest.approx(with_checkpointing.total_bytes, rel=0.05)


FLOAT = 4


def worked(model, *inputs):
    """The work of a forward and backward as it is traced for any batch and depth, and the FLOPs by torch's counter."""
    live = LiveBytes("cpu")
    with live:
        live.begin("forward", 1, "")
        model(*inputs).sum().backward()
        live.end()
    with FlopCounterMode(display=False) as counter:
        model(*inputs).sum().backward()
    return live.segments[-1].work, counter.get_total_flops()


def test_bytes_are_those_read_and_written_and_flops_those_of_torchs_counter():
    live, size = LiveBytes("cpu"), 1000 * FLOAT
    with FakeTensorMode():
        one, other = torch.empty(1000), torch.empty(1000)
        with live:
            for operation, moved in (
                (lambda: one + other, 3 * size),
                (lambda: one.add_(other), 3 * size),
                (lambda: one.view(10, 100), 0),
                (lambda: torch.empty(1000), 0),
            ):
                live.begin("forward", 1, "")
                operation()
                assert live.segments[-1].work == (1, 0, moved)
    live = LiveBytes("cpu")
    with FakeTensorMode():
        table, words = nn.Embedding(50_000, 8), torch.zeros(4, dtype=torch.int64)
        with live, torch.no_grad():
            live.begin("forward", 1, "")
            table(words)
    assert live.segments[-1].work[2] == 2 * 4 * 8 * FLOAT
    with FakeTensorMode():
        (_, flops, _), counted = worked(nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 8)), torch.randn(16, 64))
        assert flops == counted
        (_, flops, _), counted = worked(nn.Conv2d(3, 8, 4, stride=4), torch.randn(2, 3, 32, 32))
        assert flops == counted


@pytest.mark.longest
def test_three_blocks_do_the_work_of_the_whole_depth():
    spec = resolve("tiny-llama", ["model.num_hidden_layers=9", "checkpointing=full"])
    assert step_work(trace_uncached(spec), 8, 2) == pytest.approx(step_work(trace_uncached(spec, whole=True), 8, 2))


@pytest.mark.ci
@pytest.mark.long
def test_twice_the_samples_are_twice_the_flops():
    model = trace_uncached(resolve("tiny-llama"))
    once, larger, accumulated = step_work(model, 8, 1), step_work(model, 16, 1), step_work(model, 8, 2)
    assert larger.flops == accumulated.flops == pytest.approx(2 * once.flops)
    assert larger.calls == once.calls
    assert once.calls < accumulated.calls < 2 * once.calls
    # Six for each parameter that multiplies a token, and attention: 8 samples of 128 tokens.
    assert once.flops == pytest.approx(6 * 8 * 128 * (model.parameters - 4096 * 192), rel=0.12)
    assert isinstance(once, StepWork)
