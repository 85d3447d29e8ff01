"""The survey of a best-fit search: checks and plans its candidates, of a preset's model or of a script."""

from __future__ import annotations

from abc import ABC, abstractmethod

from trainfast_runner.errors import UserError
from trainfast_runner.machine.devices import Machine
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.best.candidates import enumerate_space
from trainfast_runner.search.candidate_spec import candidate_spec
from trainfast_runner.search.journal.best import BestQuestion, Candidate, Space
from trainfast_runner.settings.knob_values import KnobValue
from trainfast_runner.settings.spec import RunSpec


class Survey(ABC):
    """Checks and plans the candidates of one search on this machine.

    `spec` are the settings that the search varies, `plan` is the plan of the preset's own run, which has the preset's
    batch also where `--global-batch` gives the baseline another.
    """

    def __init__(self, spec: RunSpec, plan: RunPlan, machine: Machine) -> None:
        self.spec, self.plan, self.machine = spec, plan, machine

    @abstractmethod
    def refuse(self, spec: RunSpec) -> UserError | None:
        """Return the error of a run that cannot start here; None when it can."""

    @abstractmethod
    def plan_of(
        self, question: BestQuestion, candidate: Candidate, *, under_memory_limit: bool = False, **knobs: KnobValue
    ) -> RunPlan:
        """Return the plan of a candidate's run with further knobs, its own limit or none. Raises UserError."""

    def space(self, question: BestQuestion) -> Space:
        """Return the candidates, their memory unpredicted. Raises UserError as `enumerate_space`."""
        return enumerate_space(self.spec, self.machine, question.vary, question.global_batch, self.refuse)

    def legal_specs(self, space: Space) -> dict[int, RunSpec]:
        """Return the run of each candidate that is not ruled out, by its number."""
        return {
            number: candidate_spec(self.spec, candidate.knobs)
            for number, candidate in enumerate(space.candidates)
            if candidate.excluded_as is None
        }
