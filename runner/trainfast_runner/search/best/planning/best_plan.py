"""The plan of a best-fit search: its first journal line, and its candidates without predictions."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from trainfast_runner.records.run_file import ClockAnchor
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.best.planning.request import BestRequest
from trainfast_runner.search.best.survey.base import Survey
from trainfast_runner.search.candidate_spec import BATCH_KNOBS
from trainfast_runner.search.journal.best import BestQuestion, Space
from trainfast_runner.settings.spec import RunSpec


@dataclass(frozen=True)
class BestPlan:
    """A checked best-fit search."""

    question: BestQuestion
    """The first journal line, without its search's id, its key and the earlier effects, which `open_best` adds."""
    survey: Survey
    space: Space
    """The candidates, without predictions."""

    @property
    def plan(self) -> RunPlan:
        """The plan of the preset's own run; with `--global-batch` the baseline is that run with another batch."""
        return self.survey.plan


def global_batch_of(request: BestRequest, preset_batch: int) -> int | None:
    """Return the samples of every candidate's optimizer step: as requested, else `preset_batch`; None if free."""
    is_free = request.global_batch is None and any(name in request.vary for name in BATCH_KNOBS)
    return None if is_free else request.global_batch or preset_batch


def question_of(spec: RunSpec, plan: RunPlan, request: BestRequest, **fields: Any) -> BestQuestion:
    """Return the first line of a search's journal, without its id and key; `fields` are further fields of the line."""
    return BestQuestion(
        search_id="",
        key="",
        **spec.record_fields(),
        objective=request.objective,
        for_steps=request.for_steps,
        budget_s=request.budget_s,
        device=plan.device,
        device_names=plan.device_names,
        clock=ClockAnchor(monotonic_ns=time.monotonic_ns(), wall_ns=time.time_ns()),
        **fields,
    )
