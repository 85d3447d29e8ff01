"""Explain why memory ran out, from the records and the memory model; `predicted_changes` finds what makes it fit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainfast_runner.memory.oom.knob_changes import (
    MODEL_PHASE,
    OPTIMIZER_PHASE,
    best_of_each_knob,
    knob_changes_of_run,
)
from trainfast_runner.memory.oom.predicted_changes import (
    MAX_CHANGES,
    FitTarget,
    ModelOf,
    best_changes,
    beyond_bytes,
    predict_if_traced,
    unpredicted_change,
)
from trainfast_runner.memory.prediction import Prediction
from trainfast_runner.records.result import OomChange, OomExplanation, RunError
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.records.run_lines import Event
from trainfast_runner.settings.knob_values import tightest_limit_bytes
from trainfast_runner.settings.spec import RunSpec, spec_of_record
from trainfast_runner.units import mebibytes
from trainfast_runner.worker.shared.memory_limit import limit_of_rank

GROWING_CATEGORIES = {
    MODEL_PHASE: ("params",),
    "forward": ("activations", "temporary"),
    "backward": ("activations", "grads", "temporary", "communication"),
    OPTIMIZER_PHASE: ("optimizer", "temporary", "communication"),
}
"""Categories that grow in each phase, the usually largest first; the others exist before it."""
BYTES_OF_UNIT = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """A run that ran out of memory, and its records of the end."""

    run: RunFile
    reason: str
    error: RunError | None
    held_bytes: int | None = None
    """Bytes that the failed rank held, as it recorded them."""
    host_bytes: int | None = None
    """The most memory that the host had available during the run: it bounds a CPU run without a limit."""
    events: Sequence[Event] = ()
    tried: Sequence[Mapping[str, Any]] = ()
    """Knobs of each trial of a search's warm process, which failed at the last one."""
    in_first_step: bool = False
    """True if no step had ended."""

    @property
    def phase(self) -> str | None:
        """The phase in which memory ran out; None if unknown."""
        return self.error.phase if self.error is not None else None

    @property
    def rank(self) -> int | None:
        """The failed rank; None if unknown."""
        return self.error.rank if self.error is not None else None

    @property
    def message(self) -> str:
        """The allocator's message; empty if unknown."""
        return self.reason or (self.error.message if self.error is not None else None) or ""

    @property
    def asked_bytes(self) -> float | None:
        """Bytes of the request that failed."""
        return _bytes_after("allocate", self.message)

    @property
    def set_limit_bytes(self) -> int | None:
        """The failed rank's limit by `memory_limit`; None without one."""
        if self.run.memory_limit_bytes:
            return limit_of_rank(self.run.memory_limit_bytes, self.rank or 0)
        return tightest_limit_bytes(self.run.knobs)


def explain_preset(oom_run: OutOfMemory, model_of: ModelOf) -> OomExplanation:
    """Explain why a preset's run ran out of memory, and find changes that would make it fit.

    `model_of` returns the memory model of a spec, None if it is not traced, or raises UserError if there can be none.
    """
    run, phase = oom_run.run, oom_run.phase
    spec = spec_of_record(run)
    limit_bytes = oom_run.set_limit_bytes
    if limit_bytes is None:
        limit_bytes = _allocator_bytes(oom_run)
    _, predicted = predict_if_traced(model_of, spec, run.world_size) or (None, None)
    grown, grown_bytes = _fastest_growing(predicted, phase)
    needed_bytes = run.predicted_bytes
    if needed_bytes is None and predicted is not None:
        needed_bytes = predicted.total_bytes
    return OomExplanation(
        phase=phase,
        rank=oom_run.rank,
        grown=grown,
        grown_bytes=grown_bytes,
        held_bytes=oom_run.held_bytes,
        untouched_bytes=_untouched_bytes(oom_run),
        asked_bytes=asked_and_free(oom_run.message)[0],
        needed_bytes=needed_bytes,
        limit_bytes=limit_bytes,
        missing_bytes=_missing_bytes(oom_run, needed_bytes, limit_bytes),
        others=list(_other_processes(oom_run)),
        changes=_proposed_changes(oom_run, spec, limit_bytes, predicted, model_of),
        basis=predicted.basis if predicted is not None else "",
    )


def _proposed_changes(
    oom_run: OutOfMemory, spec: RunSpec, limit_bytes: int | None, predicted: Prediction | None, model_of: ModelOf
) -> list[OomChange]:
    """Return changes that would make the run fit the limit; without a limit, the best ones without a prediction."""
    run, phase = oom_run.run, oom_run.phase
    if limit_bytes is None:
        applicable = knob_changes_of_run(run, spec.knobs, phase)
        return [unpredicted_change(change) for change in best_of_each_knob(applicable, phase)[:MAX_CHANGES]]
    target = FitTarget(
        spec=spec,
        device=run.device,
        ranks=run.world_size,
        limit_bytes=limit_bytes,
        phase=phase,
        model_of=model_of,
        untouched_bytes=_untouched_bytes(oom_run) or 0,
        beyond_bytes=beyond_bytes(limit_bytes, predicted, phase, in_first_step=oom_run.in_first_step),
        asked_bytes=oom_run.asked_bytes,
        compute_capabilities=tuple(run.compute_capabilities),
    )
    return best_changes(target)


def _allocator_bytes(oom_run: OutOfMemory) -> int | None:
    """The most the failed rank's allocator could have: a rank's share of the host, or the figures of a GPU's error."""
    run, message = oom_run.run, oom_run.message
    if run.device == "cpu":
        if any(name in run.limits for name in ("RLIMIT_AS", "RLIMIT_DATA")):
            return None  # it counts more than the allocator's bytes
        return None if oom_run.host_bytes is None else oom_run.host_bytes // run.world_size
    free_bytes = _free_bytes(message)
    allocated_bytes = _bytes_before("is allocated by PyTorch", message)
    if free_bytes is None or allocated_bytes is None:
        return None
    return int(free_bytes + allocated_bytes + (_bytes_before("is reserved by PyTorch but unallocated", message) or 0))


def _untouched_bytes(oom_run: OutOfMemory) -> int | None:
    """The least that a CPU's limit counted beyond the memory held: address space reserved and not touched.

    RLIMIT_DATA refuses a request that would exceed it, so everything but the request was in use.
    """
    limit_bytes = oom_run.set_limit_bytes
    held_bytes = oom_run.held_bytes
    asked_bytes = oom_run.asked_bytes
    if oom_run.run.device != "cpu" or limit_bytes is None or held_bytes is None or asked_bytes is None:
        return None
    return max(0, int(limit_bytes - held_bytes - asked_bytes))


def _missing_bytes(oom_run: OutOfMemory, needed_bytes: int | None, limit_bytes: int | None) -> int | None:
    """Bytes missing by the prediction; else the least missing of the last request; None if unknown."""
    if needed_bytes is not None and limit_bytes is not None and needed_bytes > limit_bytes:
        return needed_bytes - limit_bytes
    asked_bytes = oom_run.asked_bytes
    # Under a limit that was set for the run the GPU's free memory does not matter.
    free_bytes = None if oom_run.run.memory_limit_bytes else _free_bytes(oom_run.message)
    if free_bytes is None and limit_bytes is not None and oom_run.held_bytes is not None:
        free_bytes = float(limit_bytes - oom_run.held_bytes)
    if asked_bytes is None or free_bytes is None or asked_bytes <= free_bytes:
        return None
    return int(asked_bytes - free_bytes)


def _fastest_growing(prediction: Prediction | None, phase: str | None) -> tuple[str | None, int | None]:
    """The category that grows most in this phase, and its bytes at the phase's predicted peak."""
    grows = GROWING_CATEGORIES.get(phase or "")
    if grows is None:
        return None, None
    if prediction is None:
        return grows[0], None
    phase_bytes = prediction.phases.get("optimizer" if phase == OPTIMIZER_PHASE else "forward_backward", {})
    sizes = {name: phase_bytes.get(name, 0) for name in grows}
    grown = max(sizes, key=lambda name: sizes[name])
    return grown, sizes[grown]


def _other_processes(oom_run: OutOfMemory) -> Iterator[str]:
    """Other processes that held memory of the device: by the error's message, the start of the run, and its events."""
    named_pids: set[int] = set()
    for pid, size, unit in re.findall(r"Process (\d+) has (\d[\d.]*) (KiB|MiB|GiB) memory in use", oom_run.message):
        named_pids.add(int(pid))
        yield f"process {pid} held {size} {unit}"
    for process in oom_run.run.foreign_processes:
        if process.pid is not None and process.pid not in named_pids:
            named_pids.add(process.pid)
            size = "memory" if process.memory_used_bytes is None else mebibytes(process.memory_used_bytes)
            yield f"process {process.pid} held {size} from the start"
    present: dict[tuple[int | None, int | None], Event] = {}
    for event in oom_run.events:
        if event.kind == "foreign_process" and event.state == "appeared":
            present[event.device, event.pid] = event
        elif event.kind == "foreign_process":
            present.pop((event.device, event.pid), None)
    for event in present.values():
        if event.pid not in named_pids:
            yield event.detail or f"process {event.pid} appeared"


def asked_and_free(message: str) -> tuple[int | None, int | None]:
    """Bytes of the request that an allocator's message refuses, and the bytes free then; None where it names none."""
    asked_bytes, free_bytes = _bytes_after("allocate", message), _free_bytes(message)
    return None if asked_bytes is None else int(asked_bytes), None if free_bytes is None else int(free_bytes)


def _free_bytes(message: str) -> float | None:
    """The bytes free on the GPU by torch's message; None if it names none.

    torch writes "... has a total capacity of W of which X is free. ... Of the allocated memory Y is allocated by
    PyTorch, and Z is reserved by PyTorch but unallocated."
    """
    return _bytes_after("of which", message)


def _bytes_after(phrase: str, message: str) -> float | None:
    """The size in bytes after this phrase in an allocator's message; None without the phrase."""
    match = re.search(rf"{phrase} (\d[\d.]*) ?({'|'.join(BYTES_OF_UNIT)})\b", message)
    return None if match is None else float(match[1].rstrip(".")) * BYTES_OF_UNIT[match[2]]


def _bytes_before(phrase: str, message: str) -> float | None:
    match = re.search(rf"(\d[\d.]*) (KiB|MiB|GiB) {phrase}", message)
    return None if match is None else float(match[1]) * BYTES_OF_UNIT[match[2]]
