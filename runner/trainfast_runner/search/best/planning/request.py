"""Requests for a best-fit search, read from text and checked against this machine."""

from __future__ import annotations

import re

import msgspec

from trainfast_runner.errors import UserError, nearest
from trainfast_runner.records.tick import DeviceReading
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.candidate_spec import BATCH_KNOBS
from trainfast_runner.settings.knob_values import KnobValue

SEARCH_OBJECTIVES = ("samples_per_s", "tokens_per_s", "samples_per_joule", "time")
"""Values of --objective; the first is the default."""
BUDGET_S = 600.0
"""Seconds of a search without --budget."""
UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
"""Seconds of each unit of a typed budget."""
BUDGET_EXAMPLES = ("90s", "10m", "1.5h")
"""Budgets as they are typed."""
MAX_BUDGET_H = 365 * 24
"""The largest budget: a year."""


class BestRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for a best-fit search: knobs to vary, objective, budget.

    Part of the search's key, unlike `SearchOptions`.
    """

    vary: dict[str, list[KnobValue]] = {}
    """The values of each knob to vary; empty to leave the choice to the search."""
    global_batch: int | None = None
    """None for the preset's own, or for any if `vary` names batch_size or grad_accum."""
    objective: str = "samples_per_s"
    """One of SEARCH_OBJECTIVES."""
    for_steps: int | None = None
    """Steps of the training for the objective `time`; None for another objective."""
    budget_s: float = BUDGET_S


def read_budget(text: str) -> float:
    """Return the seconds of a time as typed: 90s, 10m, 1.5h. Raises UserError, also for more than a year."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in UNITS_S or float(match[1]) == 0:
        raise UserError(f"{text!r}: not a time", key="--budget", allowed=BUDGET_EXAMPLES)
    seconds = float(match[1]) * UNITS_S[match[2]]
    if seconds > MAX_BUDGET_H * UNITS_S["h"]:
        raise UserError(f"must be at most {MAX_BUDGET_H}h, a year", key="--budget", allowed=BUDGET_EXAMPLES)
    return seconds


def check_request(request: BestRequest, plan: RunPlan) -> None:
    """Raise UserError for an objective that does not exist, cannot be measured here, or compares unequal work."""
    if request.objective not in SEARCH_OBJECTIVES:
        raise UserError(
            f"--objective {request.objective}: no such objective",
            key="--objective",
            allowed=SEARCH_OBJECTIVES,
            nearest=nearest(request.objective, SEARCH_OBJECTIVES),
        )
    if "seq_len" in request.vary and request.objective != "tokens_per_s":
        raise UserError(
            f"samples of another seq_len are other work: {request.objective} cannot compare them",
            key="--objective",
            advice="the objective tokens_per_s",
            option="--objective tokens_per_s",
        )
    if request.objective == "time":
        _check_time(request)
    elif request.for_steps is not None:
        raise UserError(f"--for-steps needs --objective time, not {request.objective}", key="--for-steps")
    if request.objective == "samples_per_joule" and not any(_has_counter(gpu) for gpu in plan.watched):
        raise UserError(
            "--objective samples_per_joule needs a GPU with an energy counter, and this run watches none",
            key="--objective",
            nearest="samples_per_s",
        )
    for name, value in (("--global-batch", request.global_batch), ("--for-steps", request.for_steps)):
        if value is not None and value < 1:
            raise UserError(f"{name} {value}: at least 1", key=name)


def _check_time(request: BestRequest) -> None:
    if request.for_steps is None:
        raise UserError("--objective time needs --for-steps N, the length of the training", key="--for-steps")
    if request.global_batch is None and any(name in request.vary for name in BATCH_KNOBS):
        raise UserError(
            "--objective time compares equal numbers of steps: it needs --global-batch N", key="--global-batch"
        )


def _has_counter(gpu: DeviceReading) -> bool:
    return gpu.energy_mj is not None or gpu.power_w is not None
