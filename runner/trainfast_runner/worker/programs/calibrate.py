"""Measure the speed of matrix products in each number format, of copying, and of small operations, on this device.

`PY calibrate.py [DEVICE]` prints one JSON line: `{device, name, threads, torch, tflops{precision: TFLOP/s},
copy_gb_per_s, operation_us, cpu_share}`. Copying counts the bytes read and the bytes written; `operation_us` is the
time of an operation too small to compute anything. `name` is null for a CPU; `cpu_share` is the share of their runnable
time in which its threads ran: other processes had the rest.
"""

import importlib
import json
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TEST_S = 0.4
"""Approximate length of each test."""
CPU_SIDE, GPU_SIDE = 1024, 8192
"""Rows and columns of the square matrices that are multiplied."""
COPY_BYTES = {"cpu": 1 << 27, "cuda": 1 << 30}
"""Bytes of the tensor that is copied."""
SMALL_BLOCKS, SMALL_WIDTH = 16, 8
"""Blocks of the model whose step is nothing but calls, and their width."""


def main(device_type: str = "cpu") -> dict[str, Any]:
    """Measure each format that the device has several times, and return the best; takes a few seconds."""
    from ..shared.process import die_with_parent

    die_with_parent()
    import torch

    device = torch.device(device_type)
    side = GPU_SIDE if device_type == "cuda" else CPU_SIDE
    formats = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if device_type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8:
        formats = {"tf32": torch.float32, **formats}
    elif device_type == "cuda":
        del formats["bf16"]
    else:
        # Most CPUs have no fast unit for fp16: its product would take longer than all others.
        del formats["fp16"]
    reached: dict[str, float] = {}
    with torch.no_grad():
        for name, dtype in formats.items():
            torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
            left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
            out = torch.empty_like(left)

            def multiply(left: Any = left, right: Any = right, out: Any = out) -> None:
                torch.mm(left, right, out=out)

            reached[name] = 2 * side**3 / _best_seconds(multiply, device) / 1e12
        source = torch.ones(COPY_BYTES[device_type], dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copied = 2 * source.numel() / _best_seconds(lambda: target.copy_(source), device) / 1e9
    return {
        "device": device_type,
        "name": torch.cuda.get_device_name(device) if device_type == "cuda" else None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "tflops": reached,
        "copy_gb_per_s": copied,
        "operation_us": 1e6 * _operation_seconds(device),
        "cpu_share": cpu_share() if device_type == "cpu" else None,
    }


def _operation_seconds(device: Any) -> float:
    """Seconds of one operation in the forward and backward of a tiny model: Python, autograd and its launch."""
    import torch
    from torch import nn
    from torch.utils._python_dispatch import TorchDispatchMode

    class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
        count: int = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    width = SMALL_WIDTH
    blocks = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(SMALL_BLOCKS)]
    model = nn.Sequential(*blocks).to(device)
    inputs = torch.ones(1, width, device=device)

    def step() -> None:
        model.zero_grad()
        model(inputs).sum().backward()

    with Calls() as calls:  # type: ignore[no-untyped-call]
        step()
    seconds: float = _best_seconds(step, device) / calls.count
    return seconds


def cpu_share() -> float | None:
    """Share of the time that this process's threads ran, not waiting for a core; None if the kernel does not count it.

    The first two fields of /proc/PID/task/TID/schedstat (Linux, Documentation/scheduler/sched-stats), in ns.
    """
    ran = waited = 0
    try:
        for task in Path("/proc/self/task").iterdir():
            on_core, in_queue, _ = map(int, (task / "schedstat").read_text().split())
            ran, waited = ran + on_core, waited + in_queue
    except (OSError, ValueError):
        return None
    return ran / (ran + waited) if ran else None


def _best_seconds(work: Callable[[], Any], device: Any) -> float:
    """Shortest time of one `work`, of several within `TEST_S` after a first that is not counted."""
    import torch

    def once() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began_s = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began_s

    once()
    times = [once()]
    while sum(times) < TEST_S:
        times.append(once())
    return min(times)


if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).parents[1] / "bootstrap.py"))
    print(json.dumps(importlib.import_module("trainfast_worker.programs.calibrate").main(*sys.argv[1:2])))
