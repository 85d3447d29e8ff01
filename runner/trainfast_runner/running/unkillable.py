"""Processes that outlive SIGKILL, in words: a GPU driver that hangs, as after an Xid, keeps them in the kernel."""

from __future__ import annotations

from collections.abc import Iterable

from trainfast_runner.machine.processes.identity import Unended
from trainfast_runner.records.run_records import RunRecords

STATE_WORDS = {
    "D": "state D (uninterruptible sleep)",
    "Z": "state Z (ended, but its tracer keeps it)",
}


def did_not_end(processes: Iterable[Unended], records: RunRecords, waited_s: float) -> str:
    """The sentence for the run's reason or troubles: each process with its pid, state and GPU."""
    ranks = {line.pid: rank for rank, lines in records.worker.items() for line in lines if line.kind == "started"}
    each = []
    for process in processes:
        rank = ranks.get(process.pid)
        place = process.name if rank is None else ", ".join([f"rank {rank}", *_gpus(rank, records)])
        each.append(f"pid {process.pid} ({place}) is in {STATE_WORDS.get(process.state, f'state {process.state}')}")
    return f"{'; '.join(each)} and did not end within {waited_s:g} s of SIGKILL"


def _gpus(rank: int, records: RunRecords) -> list[str]:
    """The GPUs of a rank by NVML index, by UUID where telemetry gave none; empty on a CPU."""
    run = records.run
    if run is None:
        return []
    uuids = run.device_uuids if run.world_size == 1 else run.device_uuids[rank : rank + 1]
    indexes = [next((s.index for _, s in records.devices.get(uuid, []) if s.index is not None), None) for uuid in uuids]
    return [uuid if index is None else f"GPU {index}" for uuid, index in zip(uuids, indexes, strict=True)]
