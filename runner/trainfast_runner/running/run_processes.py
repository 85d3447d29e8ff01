"""Which live run of a home a process belongs to: such a process is ended by stopping its run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainfast_runner.machine.processes.identity import Identity, descendants
from trainfast_runner.records.home import Home
from trainfast_runner.running.launch import live_runs
from trainfast_runner.running.recovery import launched_child_of, ranks_of, supervisor_of


@dataclass(frozen=True)
class Membership:
    """A process in a run. `place` says what it is there: its supervisor, its training process, or a process of it."""

    directory: Path
    place: str
    role: str | None
    """What the run is part of, as in `run.json`; None for a run by itself."""


def run_with(home: Home, process: Identity) -> Membership | None:
    """The live run that `process` is part of; None where it is none of this home's."""
    for run in live_runs(home):
        directory = home.directory(run.run_id)
        supervisor, launched = supervisor_of(directory), launched_child_of(directory)
        if process == supervisor:
            return Membership(directory, "its supervisor", run.role)
        if process == launched:
            return Membership(directory, "its training process", run.role)
        # Without a supervisor there is nobody left whom all ranks are below.
        above = [supervisor] if supervisor is not None else [*filter(None, [launched]), *ranks_of(directory)]
        if process in above or any(process in descendants(one.pid) for one in above):
            return Membership(directory, "one of its processes", run.role)
    return None
