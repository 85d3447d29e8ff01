"""Every spelling of running out of memory, and what only looks like one."""

from __future__ import annotations

import pytest

from trainfast_runner.worker.oom import is_out_of_memory

SPELLINGS = [
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "torch.cuda.OutOfMemoryError: HIP out of memory. Tried to allocate 20.00 MiB",
    "RuntimeError: CUDA error: out of memory",
    "torch.AcceleratorError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "RuntimeError: CUDA driver error: out of memory",
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed a non-contiguous input",
    "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "RuntimeError: Unable to find an engine to execute this computation",
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
def test_is_one(text: str) -> None:
    assert is_out_of_memory([text])
    assert is_out_of_memory(["RuntimeError: a wrapper", text])


@pytest.mark.parametrize("text", OTHERS)
def test_is_none(text: str) -> None:
    assert not is_out_of_memory([text])
