"""Errors that end a training, their records, and every spelling of out of memory."""

import json
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch

from trainfast_runner.worker.memory.allocator import fullest_device_memory
from trainfast_runner.worker.records.record_file import WorkerLog
from trainfast_runner.worker.shared.memory_limit import is_out_of_memory
from trainfast_runner.worker.shared.process import exception_chain
from trainfast_runner.worker.warm import TrialRunner


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


SPELLINGS = [
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "torch.cuda.OutOfMemoryError: HIP out of memory. Tried to allocate 20.00 MiB",
    "RuntimeError: CUDA error: out of memory",
    "torch.AcceleratorError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "RuntimeError: CUDA driver error: out of memory",
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "torch.distributed.DistBackendError: NCCL error: unhandled cuda error\nFailed to CUDA calloc async 608 bytes",
    "torch.distributed.DistBackendError: ncclUnhandledCudaError\nLast error:\nCuda failure 2 'out of memory'",
    "torch.distributed.DistBackendError: Last error:\nCuda failure 'out of memory'",
    "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried",
    "RuntimeError: [enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried to",
    "RuntimeError: Error out of memory at line 380 in file /src/csrc/pythonInterface.c",
    "torch._inductor.exc.InductorError: OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 MiB",
    "MemoryError: ",
    "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7.45 GiB for an array with shape (1000000000,)",
    "OSError: [Errno 12] Cannot allocate memory",
    "RuntimeError: std::bad_alloc",
    "Memory cgroup out of memory: Killed process 4242 (python) total-vm:1kB",
]

HINTS = [
    "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed a non-contiguous input",
    "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "RuntimeError: Unable to find an engine to execute this computation",
]

OTHERS = [
    "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 294912, Hardware limit: 232448. "
    "Reducing block sizes or `num_stages` may help.",
    "RuntimeError: CUDA error: an illegal memory access was encountered",
    "RuntimeError: CUDA error: device-side assert triggered",
    "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
    "ValueError: the room is out of chairs",
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied",
]


@pytest.mark.parametrize("text", SPELLINGS)
def test_an_oom_is_recognized(text):
    assert is_out_of_memory([text])
    assert is_out_of_memory(["RuntimeError: a wrapper", text])


@pytest.mark.parametrize("text", OTHERS)
def test_another_error_is_no_oom_however_little_is_free(text):
    assert not is_out_of_memory([text])
    assert not is_out_of_memory([text], memory_is_low=True)


@pytest.mark.parametrize("text", HINTS)
def test_a_hint_counts_only_where_little_memory_is_free(text):
    assert is_out_of_memory([text], memory_is_low=True)
    assert is_out_of_memory(["RuntimeError: a wrapper", text], memory_is_low=True)
    assert not is_out_of_memory([text])


@pytest.mark.parametrize(
    ("free", "allocated", "limit", "low"),
    [(0.3, 70, None, True), (3.0, 70, None, True), (40, 30, None, False), (40, 7.8, 8.0, True), (40, 2, 8.0, False)],
    ids=["full", "nearly full", "half free", "at its limit", "below its limit"],
)
def test_an_error_that_hints_at_memory_is_recorded_with_free_memory(tmp_path, monkeypatch, free, allocated, limit, low):
    """On a GPU of 80 GiB, whose memory alone is played; sizes in GiB."""
    gib = 1 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (int(free * gib), 80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: int(allocated * gib))
    log = WorkerLog(tmp_path, 0)
    log.available = fullest_device_memory([torch.device("cuda", 0)], None if limit is None else int(limit * gib))
    log.exception(RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"))
    line = json.loads((tmp_path / "worker.jsonl").read_text())
    assert (line["is_oom"], line["free_bytes"] < 5 * gib) == (low, low)


def test_a_device_that_does_not_answer_is_not_out_of_memory(tmp_path, monkeypatch):
    def broken(_device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "mem_get_info", broken)
    log = WorkerLog(tmp_path, 0)
    log.available = fullest_device_memory([torch.device("cuda", 0)], None)
    log.exception(RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"))
    line = json.loads((tmp_path / "worker.jsonl").read_text())
    assert (line["is_oom"], line["free_bytes"]) == (False, None)


def test_the_error_of_a_trial_is_judged_by_all_gpus_of_its_strategy(tmp_path, monkeypatch):
    """Two GPUs of 80 GiB in one process, as under dp: the second one, whose memory alone is played, is full."""
    gpus = [torch.device("cuda", 0), torch.device("cuda", 1)]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((40 - 40 * device.index) << 30, 80 << 30))

    def fail(*_):
        raise RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR")

    parts = dict.fromkeys(("spec", "config", "samples")) | {"memory": SimpleNamespace(free_reserve=lambda: None)}
    runner = TrialRunner(device=torch.device("cpu"), log=WorkerLog(tmp_path, 0), **parts)
    state = SimpleNamespace(strategy=SimpleNamespace(devices=gpus, all_reduce=fail))
    runner._state = state
    with pytest.raises(RuntimeError, match="CUDNN"):
        runner.run([{"do": "trial", "steps": 1, "more": True}])
    assert json.loads((tmp_path / "worker.jsonl").read_text())["outcome"] == "oom"
