"""A model that one device cannot train starts, and trains, on two of that size."""

import importlib.util

import pytest
from worker_knobs import llama

# 41 million parameters, of which AdamW in fp32 keeps 16 bytes each: 626 MiB. No block is a tenth of it.
WIDTHS = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "vocab_size": 512}
DEEP = llama(**WIDTHS, num_hidden_layers=12, max_position_embeddings=64)
DEVICE_BYTES = 580 << 20
SHORT = {"model": DEEP, "steps": 2, "timing_warmup": 1, "batch_size": 2, "lr": 1e-4, "optimizer": "adamw-loop"}
deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


def test_one_device_cannot_train_it(train):
    run = train(**SHORT, memory_limit_bytes=[DEVICE_BYTES])
    assert run.code == 1
    assert "can't allocate memory" in run.record("exception")["message"]


@pytest.mark.parametrize("strategy", ["fsdp", "tp", "pp", pytest.param("zero3", marks=deepspeed)])
def test_two_devices_can_train_it(train, strategy):
    knobs = {"micro_batches": 2} if strategy == "pp" else {}
    run = train(**{**SHORT, **knobs}, ranks=2, strategy=strategy, memory_limit_bytes=[DEVICE_BYTES] * 2)
    assert run.code == 0, run.stderr[-3000:]
    for rank in (0, 1):
        assert [step["step"] for step in run.steps(rank)] == [1, 2]
        assert max(step["peak_allocated_bytes"] for step in run.steps(rank)) < DEVICE_BYTES
