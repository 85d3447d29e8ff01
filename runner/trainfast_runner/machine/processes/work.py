"""The work of the processes below another one: their processor time, and the compilers among them."""

from __future__ import annotations

from dataclasses import dataclass

from trainfast_runner.machine.processes.family import processes_below

COMPILER_PROGRAMS = {
    *("ninja", "nvcc", "cicc", "cudafe++", "ptxas", "hipcc"),
    *("cc", "c++", "gcc", "g++", "cc1", "cc1plus", "clang", "clang++"),
}
"""Names of the programs that build DeepSpeed's extensions and the kernels of torch.compile."""


@dataclass(frozen=True)
class ProcessWork:
    """The running processes' processor time so far in seconds, and the names of compilers among them."""

    cpu_s: float = 0.0
    compilers: tuple[str, ...] = ()


def work_below(root_pid: int) -> ProcessWork:
    """Return the work of all processes below `root_pid`; none if /proc cannot be read now."""
    try:
        running = [stat for _, stat in processes_below(root_pid) if not stat.ended]
    except OSError:
        return ProcessWork()
    names = {stat.name for stat in running}
    return ProcessWork(sum(stat.cpu_s for stat in running), tuple(sorted(names & COMPILER_PROGRAMS)))
