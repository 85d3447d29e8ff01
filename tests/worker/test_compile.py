"""A compiled module trains the same; the steps that compile are known and enter no figure."""

import shutil

import pytest
from worker_knobs import llama

from trainfast_runner.worker.catalog import compile_mode

NEEDS_GXX = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
SMALLEST, TWO_BLOCKS = (
    llama(hidden_size=32, intermediate_size=64, num_hidden_layers=blocks, num_attention_heads=2) for blocks in (1, 2)
)


@pytest.mark.ci
def test_a_cuda_graph_is_replayed_only_where_no_gradient_has_to_outlive_it():
    assert [compile_mode(value, 1) for value in ("default", "blocks")] == ["default", "default"]
    assert (compile_mode("max-autotune", 1), compile_mode("reduce-overhead", 1)) == ("max-autotune", "reduce-overhead")
    assert compile_mode("max-autotune", 2) == "max-autotune-no-cudagraphs"
    assert compile_mode("reduce-overhead", 2) == "default"


@NEEDS_GXX
def test_a_compiled_module_learns_the_same_and_says_which_steps_compiled(train):
    asked = {"model": SMALLEST, "grad_accum": 2, "timing_warmup": 0, "memory_limit_bytes": [1 << 30]}
    eager, compiled = train(**asked), train(**asked, compile="default")
    assert compiled.code == 0, compiled.stderr[-3000:]
    assert compiled.losses() == pytest.approx(eager.losses(), rel=1e-4)
    assert [step["step"] for step in compiled.steps() if step.get("compiling")] == [1]
    assert [step["warmup"] for step in compiled.steps()] == [True] + [False] * 5
    actual = compiled.record("actual")
    assert (actual["compiled"], actual["wrapper"], actual["compute_dtype"]) == (True, "none", "float32")
    assert actual["compiled_blocks"] == 0
    assert eager.record("actual")["compiled"] is False
    plain, fused = (run.steps()[0]["peak_allocated_bytes"] for run in (eager, compiled))
    assert fused <= plain + (4 << 20), "what the compiler takes, some 100 MiB, is not the training's"


@NEEDS_GXX
def test_blocks_compile_once_and_learn_the_same_with_checkpointing_and_a_chunked_loss(train):
    asked = {"model": TWO_BLOCKS, "grad_accum": 2, "timing_warmup": 0}
    eager = train(**asked)
    for others in ({}, {"checkpointing": "full", "loss": "chunked"}, {"checkpointing": "selective"}):
        blocks = train(**asked, compile="blocks", **others)
        assert blocks.code == 0, blocks.stderr[-3000:]
        assert blocks.losses() == pytest.approx(eager.losses(), rel=1e-4)
        assert [step["step"] for step in blocks.steps() if step.get("compiling")] == [1]
        actual = blocks.record("actual")
        assert (actual["compiled"], actual["compiled_blocks"], actual["wrapper"]) == (True, 2, "none")


@NEEDS_GXX
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_blocks_compile_under_wrappers_that_gather_and_reduce(train, strategy):
    eager = train(model=TWO_BLOCKS, timing_warmup=0)
    asked = {"model": TWO_BLOCKS, "timing_warmup": 0, "ranks": 2, "strategy": strategy, "batch_size": 4}
    for others in ({}, {"checkpointing": "full", "precision": "bf16"}):
        blocks = train(**asked, compile="blocks", **others)
        assert blocks.code == 0, blocks.stderr[-3000:]
        assert blocks.losses() == pytest.approx(eager.losses(), rel=1e-2 if others else 1e-4)
        actual = blocks.record("actual", rank=1)
        assert (actual["compiled"], actual["compiled_blocks"]) == (True, 2)
        assert actual["wrapper"] == ("DistributedDataParallel" if strategy == "ddp" else "FSDPModule")
