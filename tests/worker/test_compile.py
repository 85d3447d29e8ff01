"""A compiled module trains the same; the steps that compile are known and enter no figure."""

import shutil
from dataclasses import replace

import pytest
from worker_knobs import llama, worker_knobs

from trainfast_runner.worker.model.build import mode_of

SMALLEST = llama(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)


@pytest.mark.ci
def test_a_cuda_graph_is_replayed_only_where_no_gradient_has_to_outlive_it():
    tuned = worker_knobs(compile="max-autotune")
    assert (mode_of(worker_knobs(compile="default")), mode_of(tuned)) == (None, "max-autotune")
    assert mode_of(replace(tuned, grad_accum=2)) == "max-autotune-no-cudagraphs"


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
def test_a_compiled_module_learns_the_same_and_says_which_steps_compiled(train):
    asked = {"model": SMALLEST, "grad_accum": 2, "timing_warmup": 0}
    eager, compiled = train(**asked), train(**asked, compile="default")
    assert compiled.code == 0, compiled.stderr[-3000:]
    assert compiled.losses() == pytest.approx(eager.losses(), rel=1e-4)
    assert [step["step"] for step in compiled.steps() if step.get("compiling")] == [1]
    assert [step["warmup"] for step in compiled.steps()] == [True] + [False] * 5
    actual = compiled.record("actual")
    assert (actual["compiled"], actual["wrapper"], actual["compute_dtype"]) == (True, "none", "float32")
    assert eager.record("actual")["compiled"] is False
