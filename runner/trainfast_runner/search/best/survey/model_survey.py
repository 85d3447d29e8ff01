"""Check and plan the candidates of a preset on this machine, and predict their memory by traced models."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from trainfast_runner.errors import UserError
from trainfast_runner.known_values import lowest
from trainfast_runner.machine import training_python
from trainfast_runner.machine.cgroup import read_host_free_bytes
from trainfast_runner.machine.devices import detect_machine
from trainfast_runner.machine.worker_programs import ProgramCancelled
from trainfast_runner.memory.sharding import PREDICTED_STRATEGIES
from trainfast_runner.memory.tracing import cached_models, trace_models
from trainfast_runner.running import planning
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.best.candidates import with_predictions
from trainfast_runner.search.best.survey.base import Survey
from trainfast_runner.search.candidate_spec import candidate_spec
from trainfast_runner.search.journal.best import BestQuestion, Candidate, Space
from trainfast_runner.search.memory.limits import share_of_free
from trainfast_runner.settings.compatibility.check import check
from trainfast_runner.settings.compatibility.facts import Facts
from trainfast_runner.settings.device_counts import device_count
from trainfast_runner.settings.knob_values import KnobValue
from trainfast_runner.settings.spec import RunSpec

ASKS_THE_MODEL = ("sdpa", "flash")
"""Values of `attention` that only the model's class can confirm, which takes an import of torch."""


class ModelSurvey(Survey):
    """The survey of a preset: which candidates its compatibility rules refuse, and which are too large."""

    def __init__(self, spec: RunSpec, plan: RunPlan) -> None:
        inspected = training_python.inspect(plan.python, spec.model, spec.data["objective"])
        machine = detect_machine(inspected.versions, inspected.executable).used_by(spec.knobs["devices"])
        super().__init__(spec, plan, machine)
        self._facts = Facts(spec, machine, inspected.config, inspected.versions, inspected.executable)

    def refuse(self, spec: RunSpec) -> UserError | None:
        """Return the error of a run that cannot start here; None when it can."""
        try:
            check(replace(self._facts, spec=spec))
        except UserError as error:
            return error
        return None

    def plan_of(
        self, question: BestQuestion, candidate: Candidate, *, under_memory_limit: bool = False, **knobs: KnobValue
    ) -> RunPlan:
        """Return the plan of a candidate's run with further knobs, its own limit or none. Raises UserError."""
        limit = self.spec.knobs["memory_limit"] if under_memory_limit else None
        spec = candidate_spec(self.spec, candidate.knobs).with_overrides(memory_limit=limit, **knobs)
        # Every process takes the same GPUs, even if others have more free memory by now.
        uuids = question.device_uuids
        return planning.plan_run(spec, self.plan.python, uuids[: device_count(spec, self.machine)] if uuids else ())

    def predict_candidates(self, question: BestQuestion, cancelled: threading.Event) -> Space:
        """Return the candidates with their predicted memory; models are traced until `cancelled` is set."""
        self._ask_attentions(question)
        space = self.space(question)
        self._trace(space, cancelled)
        return self._predicted(space)

    def _ask_attentions(self, question: BestQuestion) -> None:
        """Learn which attention kernels the model has, if a candidate names one: some seconds the first time."""
        values = question.vary.get("attention", [self.spec.knobs["attention"]])
        if any(value in ASKS_THE_MODEL for value in values):
            training_objective = self.spec.data["objective"]
            inspected = training_python.inspect(self.plan.python, self.spec.model, training_objective, attention=True)
            self._facts = replace(self._facts, attentions=inspected.attentions)

    def _trace(self, space: Space, cancelled: threading.Event) -> None:
        """Trace the memory models that the legal candidates need into the cache, until `cancelled` is set."""
        specs = [spec for spec in self.legal_specs(space).values() if spec.knobs["strategy"] in PREDICTED_STRATEGIES]
        plan = self.plan
        try:
            for _ in trace_models(specs, plan.device, plan.python, cancelled=cancelled, gpus=plan.device_uuids):
                pass  # the model is in the cache now, or cannot be traced
        except (ProgramCancelled, UserError):
            return  # candidates without a model are tried unpredicted

    def _predicted(self, space: Space) -> Space:
        """Return the space with the memory that cached models predict, and without the candidates too large for it."""
        model_of = cached_models(self.plan.device, self.plan.python, next(iter(self.plan.device_names), None))
        needed_bytes: dict[int, int] = {}
        for number, spec in self.legal_specs(space).items():
            model = model_of(spec) if spec.knobs["strategy"] in PREDICTED_STRATEGIES else None
            if model is not None:
                prediction = model.predict(spec, space.candidates[number].world_size)
                needed_bytes[number] = prediction.total_bytes + (prediction.context_bytes or 0)
        return with_predictions(space, needed_bytes, self._limit_of(space))

    def _limit_of(self, space: Space) -> Callable[[int], int | None]:
        """Return a function from a candidate's number to the bytes that each of its ranks may take, None if unknown.

        They are `memory_limit`, else the free memory. On a CPU all ranks of a candidate share the free memory.
        """
        plan = self.plan
        limit_bytes = min(plan.memory_limit_bytes or (), default=None)
        if plan.device == "cpu":
            free_bytes = read_host_free_bytes()

            def host_limit(number: int) -> int:
                ranks = space.candidates[number].world_size
                if limit_bytes is not None and ranks * limit_bytes <= free_bytes:
                    return limit_bytes
                return share_of_free(free_bytes, ranks)

            return host_limit
        gpu_limit = lowest(gpu.memory_free_bytes for gpu in plan.gpus) if limit_bytes is None else limit_bytes
        return lambda number: gpu_limit
