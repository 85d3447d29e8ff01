"""The real worker under the real supervisor: what stand-ins cannot prove."""

import os
import signal
import sys
from pathlib import Path

import pytest

from cli.command import until
from trainfast_runner import worker
from trainfast_runner.running.settling import request_stop
from trainfast_runner.settings.knobs import defaults

BOOTSTRAP = str(Path(worker.__file__).parent / "bootstrap.py")
MODEL = {
    "family": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "vocab_size": 30100, "max_position_embeddings": 64,
}  # fmt: skip


def real(run, ranks, steps):
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=0"]
    return {
        "argv": [sys.executable, *(launcher if ranks > 1 else []), BOOTSTRAP, str(run.directory)],
        "env": {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        "model": MODEL,
        "data": {"kind": "random", "objective": "causal-lm"},
        "world_size": ranks,
        "knobs": {
            **defaults(),
            "precision": "fp32",
            "batch_size": 2,
            "seq_len": 16,
            "optimizer": "adamw",
            "strategy": "ddp" if ranks > 1 else "single",
            "steps": steps,
            "timing_warmup": 2,
            "checkpointing": "off",
        },
    }


@pytest.mark.long
@pytest.mark.ci
def test_a_rank_of_torchrun_is_killed(run, ended_clean):
    run.start("", **real(run, ranks=2, steps=1_000_000))
    for name in ("steps.jsonl", "steps.rank1.jsonl"):
        path = run.directory / name
        until(lambda path=path: path.exists() and path.read_bytes().count(b"\n") > 4, f"five lines in {name}")
    run.in_training()
    lost = run.worker("started", 1)[0]["pid"]
    os.kill(lost, signal.SIGKILL)
    result = run.end()
    assert result.state == "failed"
    assert result.reason.startswith("rank 1 died of SIGKILL (after step ")
    assert (result.error.rank, result.actual.wrapper) == (1, "DistributedDataParallel")
    assert result.throughput.samples_per_s.median
    ended_clean(run)


@pytest.mark.long
def test_a_stop_keeps_every_step(run, ended_clean):
    run.start("", **real(run, ranks=1, steps=1_000_000))
    path = run.directory / "steps.jsonl"
    until(lambda: path.exists() and path.stat().st_size, "a step")
    request_stop(run.directory)
    result = run.end()
    assert result.state == "stopped"
    recorded = (run.directory / "steps.jsonl").read_bytes().splitlines()
    assert result.steps.measured + result.steps.warmup == len(recorded) > 0
    assert result.synthetic_data is True
    ended_clean(run)
