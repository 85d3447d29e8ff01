"""What takes seconds to find out of machine and model, and is found out in a thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_tui.control.messages import MachineSeen, SituationSeen

if TYPE_CHECKING:
    from trainfast_runner.machine.devices import Machine
    from trainfast_runner.settings.spec import RunSpec


def look_at_machine(python: str | None) -> MachineSeen:
    """The machine as the training Python's torch can use it; without a torch there is no GPU to train on."""
    from trainfast_runner.machine.devices import look
    from trainfast_runner.machine.training_python import inspect

    try:
        versions = inspect(python, {}, "causal-lm").versions
    except UserError:
        versions = {}
    return MachineSeen(look(versions, python))


def situation_of(spec: RunSpec, machine: Machine, home: Home, python: str | None) -> SituationSeen:
    """What the advisor needs to know of this run's model, the machine and its history; takes seconds."""
    from trainfast_runner.search.advice.situation import gather

    return SituationSeen(gather(spec, machine, home, python))
