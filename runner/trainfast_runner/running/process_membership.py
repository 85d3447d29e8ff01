"""The live run that a process of this machine is part of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainfast_runner.machine.processes import Identity, descendants
from trainfast_runner.records.home import Home
from trainfast_runner.running.present_state import live_runs
from trainfast_runner.running.run_processes import launched_child_of, running_ranks, supervisor_of


@dataclass(frozen=True)
class Membership:
    """The part of a process in a run."""

    directory: Path
    part: str
    """The part in words: its supervisor, its training process, or one of its processes."""
    role: str | None
    """The run's role as in `run.json`; None for a run by itself."""


def run_of_process(home: Home, process: Identity) -> Membership | None:
    """The live run that `process` is part of; None when it is none of this home's."""
    for run in live_runs(home):
        directory = home.directory(run.run_id)
        supervisor = supervisor_of(directory)
        launched_child = launched_child_of(directory)
        if process == supervisor:
            return Membership(directory, "its supervisor", run.role)
        if process == launched_child:
            return Membership(directory, "its training process", run.role)
        # Without a supervisor no process is above all ranks.
        ancestors = (
            [supervisor] if supervisor is not None else [*filter(None, [launched_child]), *running_ranks(directory)]
        )
        if process in ancestors or any(process in descendants(ancestor.pid) for ancestor in ancestors):
            return Membership(directory, "one of its processes", run.role)
    return None
