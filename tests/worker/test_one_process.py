"""`dp`: torch's own threads, each of which computes in the precision asked for.

Only the accelerator's boundary is played: torch's `parallel_apply` refuses to start threads without one. The threads,
autocast and the model are real, on the CPU, whose autocast computes in bf16 unless told otherwise, as a GPU's in fp16.
"""

from contextlib import nullcontext

import pytest
import torch
from torch.nn.parallel import DataParallel, parallel_apply
from transformers import LlamaConfig
from worker_knobs import worker_knobs

from trainfast_runner.worker.model.build import build_model
from trainfast_runner.worker.model.optimizer import Precision
from trainfast_runner.worker.model.weights import init_weights
from trainfast_runner.worker.strategies.base import DataParallelStrategy

CPU = torch.device("cpu")
LLAMA = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)


@pytest.fixture(autouse=True)
def two_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    enabled = torch.is_autocast_enabled
    # Asked without a device, torch answers for CUDA.
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device="cpu": enabled(device))
    for name, played in {
        "is_available": lambda: True,
        "current_accelerator": lambda: CPU,
        "current_stream": lambda _device=None: nullcontext(),
        "device_index": lambda _device: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.accelerator, name, played)


def dtypes_in_threads(module, precision):
    """The dtypes of the logits of two threads that the loop's autocast surrounds."""
    batch = {"input_ids": torch.zeros(1, 8, dtype=torch.long)}
    with precision.autocast():
        outputs = parallel_apply([module, module], [(), ()], [batch, batch], [0, 1])
    return {output.logits.dtype for output in outputs}


def test_torchs_threads_forget_the_dtype_of_autocast():
    """The cause: where this fails, torch hands its threads the dtype, and `Autocast` is no longer needed."""
    model = build_model(LLAMA, "causal-lm", worker_knobs(), CPU)
    init_weights(model, 0, CPU)
    assert dtypes_in_threads(model, Precision("fp16", CPU)) == {torch.bfloat16}


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp32", torch.float32)]
)
def test_dp_computes_in_the_dtype_asked_for(precision, dtype):
    knobs = worker_knobs(strategy="dp", precision=precision)
    strategy = DataParallelStrategy(knobs, CPU)
    module = strategy.wrap(build_model(LLAMA, "causal-lm", knobs, CPU))
    assert isinstance(module, DataParallel)
    assert dtypes_in_threads(module.module, strategy.precision) == {dtype}
