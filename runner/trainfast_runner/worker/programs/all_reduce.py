"""Time all-reduces between the ranks of a torchrun, one a host: over NCCL where each has a GPU of its own, else gloo.

`PY -m torch.distributed.run … all_reduce.py`: rank 0 prints one JSON line: `{world_size, backend, bytes, seconds}`, the
median of an all-reduce of so many bytes. Other ranks print nothing.
"""

import importlib
import json
import runpy
import statistics
import time
import zlib
from datetime import timedelta
from pathlib import Path

BYTES = 32 << 20
"""Bytes of the tensor: enough that the link's latency does not count."""
TEST_S, PATIENCE_S = 5.0, 60.0
"""Approximate length of the test, and the longest that a collective waits for a lost rank."""


def main() -> None:
    """Measure for about `TEST_S` seconds, and end this process."""
    from ..shared.process import die_with_parent, exit_now

    die_with_parent()
    import torch
    from torch import distributed

    patience = timedelta(seconds=PATIENCE_S)
    distributed.init_process_group("gloo", timeout=patience)
    # NCCL refuses two ranks on one GPU, as those of `local,local` on a machine with one.
    uuid = str(torch.cuda.get_device_properties(0).uuid) if torch.cuda.is_available() else ""
    gpus = [torch.zeros(1, dtype=torch.int64) for _ in range(distributed.get_world_size())]
    distributed.all_gather(gpus, torch.tensor([zlib.crc32(uuid.encode())]))
    has_own_gpus = len({0, *(gpu.item() for gpu in gpus)}) > len(gpus)
    backend, device = ("nccl", "cuda") if has_own_gpus else ("gloo", "cpu")
    group = distributed.new_group(backend=backend, timeout=patience)
    buffer = torch.zeros(BYTES // 4, device=device)

    def all_reduce_s() -> float:
        began_s = time.perf_counter()
        distributed.all_reduce(buffer, group=group)
        buffer[0].item()  # a GPU's work is queued
        return time.perf_counter() - began_s

    all_reduce_s()  # connects
    first_s = torch.tensor([all_reduce_s()])
    distributed.broadcast(first_s, 0)  # every rank makes as many
    seconds = statistics.median(all_reduce_s() for _ in range(max(1, min(2000, int(TEST_S / first_s.item())))))
    distributed.barrier()
    if distributed.get_rank() == 0:
        print(json.dumps({"world_size": len(gpus), "backend": backend, "bytes": BYTES, "seconds": seconds}))
    exit_now(0)


if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).parents[1] / "bootstrap.py"))
    importlib.import_module("trainfast_worker.programs.all_reduce").main()
