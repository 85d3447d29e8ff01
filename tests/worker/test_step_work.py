"""The work of a step, counted while it is traced: as torch's own counter counts it, for any batch and depth."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from worker_knobs import trace_uncached

from trainfast_runner.memory.model import StepWork, step_work
from trainfast_runner.settings.spec import resolve
from trainfast_runner.worker.memory_trace.live_bytes import LiveBytes

FLOAT = 4


def worked(model, *inputs):
    """The work of a forward and backward, and the FLOPs by torch's counter."""
    live = LiveBytes("cpu")
    with live:
        live.begin("forward", 1, "")
        model(*inputs).sum().backward()
        live.end()
    with FlopCounterMode(display=False) as counter:
        model(*inputs).sum().backward()
    return live.segments[-1].work, counter.get_total_flops()


def test_flops_are_those_of_torchs_counter():
    with FakeTensorMode():
        (_, flops, _), counted = worked(nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 8)), torch.randn(16, 64))
        assert flops == counted
        (_, flops, _), counted = worked(nn.Conv2d(3, 8, 4, stride=4), torch.randn(2, 3, 32, 32))
        assert flops == counted


def test_bytes_are_those_read_and_written():
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


def test_a_lookup_reads_the_rows_and_not_the_table():
    live = LiveBytes("cpu")
    with FakeTensorMode():
        table, words = nn.Embedding(50_000, 8), torch.zeros(4, dtype=torch.int64)
        with live, torch.no_grad():
            live.begin("forward", 1, "")
            table(words)
    assert live.segments[-1].work[2] == 2 * 4 * 8 * FLOAT


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
