"""Errors that end a training, and their records; the SIGTERM thread uses no GPU but its own rank's."""

import subprocess
import sys
import textwrap

import pytest

from trainfast_runner.worker.shared.process import exception_chain


@pytest.mark.long
def test_a_memory_limit_gives_the_allocators_own_error(train):
    run = train(batch_size=4096, memory_limit_bytes=[1 << 30])
    assert run.code == 1
    error = run.record("exception")
    assert error["is_oom"] is True
    assert "DefaultCPUAllocator: can't allocate memory" in error["message"]
    assert (error["rank"], error["phase"], error["step"]) == (0, "forward", 1)
    assert "loss_sum" in error["traceback"] or "DefaultCPUAllocator" in error["traceback"]
    assert "DefaultCPUAllocator" in run.stderr
    assert 0 < error["held_bytes"] < 1 << 30, "what it had by then"


@pytest.mark.parametrize(
    ("request_", "key", "nearest"),
    [
        # Beside the tests of one process, whose trainings are forked from one process too.
        pytest.param(
            {"model": {"family": "llama", "hiden_size": 64}},
            "model.hiden_size",
            "hidden_size",
            marks=pytest.mark.xdist_group("one-process"),
        ),
        pytest.param({"model": {"family": "lama"}}, "model.family", "llama", marks=pytest.mark.long),
        pytest.param({"seq_len": 4096}, "seq_len", "128", marks=pytest.mark.longest),
        pytest.param({"data": {"kind": "files", "paths": ["/no/file"]}}, "data.paths", None, marks=pytest.mark.long),
    ],
    ids=["field", "family", "seq_len", "file"],
)
def test_a_mistake_names_its_key_and_the_nearest_name(train, request_, key, nearest):
    run = train(**request_)
    assert run.code == 2, run.stderr
    invalid = run.record("invalid")
    assert (invalid["key"], invalid["nearest"]) == (key, nearest)
    assert invalid["message"] in run.stderr


@pytest.mark.long
def test_an_exception_is_written_by_the_worker_itself(train, tmp_path):
    not_a_folder = tmp_path / "cache"
    not_a_folder.write_text("")
    run = train(cache=not_a_folder)
    assert run.code == 1
    error = run.record("exception")
    assert (error["type"], error["phase"], error["is_oom"]) == ("FileExistsError", "data", False)
    assert error["chain"][0] == {"type": error["type"], "message": error["message"]}


def test_a_chain_runs_from_the_outermost_error_to_its_cause():
    def fail():
        try:
            raise MemoryError("no more")
        except MemoryError as error:
            raise RuntimeError("compiling failed") from error

    with pytest.raises(RuntimeError) as caught:
        fail()
    assert exception_chain(caught.value) == [
        {"type": "RuntimeError", "message": "compiling failed"},
        {"type": "MemoryError", "message": "no more"},
    ]


ON_THE_SECOND_GPU = """
    import os, signal, sys, threading
    from types import SimpleNamespace

    import torch

    # CUDA's own rule, played: each thread has a current device, the first GPU until it is set.
    current = threading.local()
    torch.cuda.set_device = lambda device: setattr(current, "index", device.index)

    from trainfast_runner.worker.training import keep_last_step_on_sigterm

    recorder = SimpleNamespace(flush=lambda timeout_s: print("asked on GPU", getattr(current, "index", 0), flush=True))
    log = SimpleNamespace(write=lambda *_, **__: None, phase="train", step=3)
    device = torch.device("cuda", 1)
    torch.cuda.set_device(device)
    keep_last_step_on_sigterm(recorder, log, device)
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(60)
"""


@pytest.mark.ci
@pytest.mark.long
def test_the_sigterm_thread_asks_its_own_ranks_gpu():
    """Anything it asks CUDA elsewhere makes a context, of hundreds of MiB, on another rank's GPU."""
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ON_THE_SECOND_GPU)], capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stdout) == (143, "asked on GPU 1\n"), ended.stderr
