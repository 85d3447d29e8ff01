"""Details of `monitor`: links, memory errors, processes and problems."""

from __future__ import annotations

from collections.abc import Sequence

from trainfast_runner.machine.gpus.health import defects
from trainfast_runner.machine.process_list import command_line, owner_uid, user_name
from trainfast_runner.machine.processes import sees_host_pids
from trainfast_runner.records.tick import DeviceReading
from trainfast_tui.text.format import ABSENT, count, size
from trainfast_tui.text.tables import FigureHeading, table


def ecc_errors(gpu: DeviceReading) -> str:
    """Return the uncorrected ECC errors since the driver was loaded, and the corrected ones if there are any."""
    if gpu.ecc_uncorrected_errors is None:
        return ABSENT
    corrected = f" (+{count(gpu.ecc_corrected_errors)})" if gpu.ecc_corrected_errors else ""
    return count(gpu.ecc_uncorrected_errors) + corrected


def lines_below(gpus: Sequence[DeviceReading]) -> list[str]:
    """Return the lines below the table: the processes on the GPUs, then each problem with its cure."""
    answering = [gpu for gpu in gpus if not gpu.error]
    processes = [row for gpu in answering for row in _processes(gpu)]
    lines = []
    if processes:
        lines = ["", *table(("GPU", "PID", "OWNER", FigureHeading("MEMORY"), "COMMAND"), processes, max_cells=48)]
    wrong = [f"GPU {gpu.index}: {defect.finding}. Cure: {defect.cure}" for gpu in answering for defect in defects(gpu)]
    return [*lines, *([""] if lines and wrong else []), *wrong]


def _processes(gpu: DeviceReading) -> list[tuple[str, ...]]:
    """Return a GPU's processes.

    Inside a container the driver gives host process ids, whose owner and command are unknown.
    """
    rows: list[tuple[str, ...]] = []
    for process in gpu.processes or ():
        uid = owner_uid(process.pid) if sees_host_pids() else None
        owner = ABSENT if uid is None else user_name(uid)
        command = ABSENT if uid is None else command_line(process.pid) or ABSENT
        rows.append((str(gpu.index), str(process.pid), owner, size(process.memory_used_bytes), command))
    return rows
