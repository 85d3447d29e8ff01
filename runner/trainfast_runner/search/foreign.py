"""Whether another process took GPU memory while a size was tried: then its outcome says nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from trainfast_runner.records.run_records import TELEMETRY_FILE
from trainfast_runner.records.telemetry_lines import read_ticks
from trainfast_runner.records.tick import Tick
from trainfast_runner.search.processes import ProbeLine
from trainfast_runner.units import mebibytes

TOO_MUCH_BYTES = 64 << 20


def taken_by_others(
    directory: Path, said: Mapping[int, ProbeLine], own_pids: Collection[int], devices: Collection[str], begin_ns: int
) -> str | None:
    """What another process did, in words; None where nothing is known of one. `begin_ns` is when the probe began.

    What a rank may use shrinks when another process takes memory; but the first size of a process loads kernels,
    which shrinks it as well, so there only the driver's list of processes tells. A later one may need others, for its
    other shapes: tried again it has them.
    """
    for rank, line in sorted(said.items()):
        if line.number == 1 or line.room_bytes is None or line.room_after_bytes is None:
            continue
        lost = line.room_bytes - line.room_after_bytes
        if lost > TOO_MUCH_BYTES:
            return (
                f"rank {rank}'s GPU has {mebibytes(lost)} less for it than before: another process took it, or kernels"
                " that this size is the first to need"
            )
    try:
        ticks, _ = read_ticks(directory / TELEMETRY_FILE)
    except OSError:
        return None
    return grown(ticks, own_pids, devices, begin_ns)


def grown(ticks: Iterable[Tick], own_pids: Collection[int], devices: Collection[str], begin_ns: int) -> str | None:
    """By how much the processes of others grew on the run's devices since just before `begin_ns`, in words.

    None where they did not, and where the driver's process ids are not those of this container: where none of
    `own_pids` is listed, nobody can be told apart.
    """
    before: dict[str, dict[int, int]] = {}
    for tick in ticks:
        for device in tick.devices:
            if device.uuid not in devices or device.uuid is None or device.processes is None:
                continue
            listed = {process.pid: process.memory_used_bytes or 0 for process in device.processes}
            others = {pid: used for pid, used in listed.items() if pid not in own_pids}
            if tick.t_ns < begin_ns or device.uuid not in before:
                before[device.uuid] = others
                continue
            if len(others) == len(listed):
                continue
            for pid, used in others.items():
                more = used - before[device.uuid].get(pid, 0)
                if more > TOO_MUCH_BYTES:
                    return f"process {pid} took {mebibytes(more)} of GPU {device.index} meanwhile"
    return None
