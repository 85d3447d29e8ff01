"""The typed lines of `worker.jsonl`, one type a kind: the reports of one rank, or of the hooks in a user's own script.
Orders to a search's warm process, in `control.jsonl`, and its answers come last.

Unknown fields and kinds are ignored, absent fields are None.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec

from trainfast_runner.records.json_lines import Tail, newest, read_all
from trainfast_runner.records.result import RunError
from trainfast_runner.records.run_file import BatchWidths, RecordedKnobs, RunFile
from trainfast_runner.records.run_lines import Actual, Bounded, Count, Step
from trainfast_runner.worker.shared.words import PROBE, TRIAL

T = TypeVar("T")


class RankLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Fields of every kind: the time (CLOCK_MONOTONIC), and the rank if the line names it."""

    t_ns: Count
    rank: Count | None = None


class StartedLine(RankLine, frozen=True, kw_only=True, tag="started"):
    """The rank's process."""

    node: Count = 0
    pid: Count | None = None
    start_ticks: Count | None = None


class PhaseLine(RankLine, frozen=True, kw_only=True, tag="phase"):
    """A phase begins: import, data, model or train."""

    phase: str | None = None
    detail: str | None = None


class DataLine(RankLine, frozen=True, kw_only=True, tag="data"):
    """The data that is trained on."""

    synthetic: bool | None = None
    source: str | None = None


class CpuLine(RankLine, frozen=True, kw_only=True, tag="cpu"):
    """The allocator and the threads that a CPU run's figures come from."""

    allocator: str | None = None
    thresholds: str | None = None
    kept_because: str | None = None
    threads: int | None = None
    wait_policy: str | None = None


class ActualLine(Actual, frozen=True, kw_only=True, tag_field="kind", tag="actual"):
    """The settings that really ran, with those that a result does not keep."""

    t_ns: Count
    rank: Count | None = None
    checkpointing: str | None = None
    reshard: str | None = None
    device_name: str | None = None
    model_flops_per_sample: Bounded | None = None
    recomputed_flops_per_sample: Bounded | None = None
    notebook_flops_per_sample: Bounded | None = None
    loader_workers_alive: int | None = None


class ScriptLine(RankLine, frozen=True, kw_only=True, tag="script"):
    """The findings of the hooks in a user's own script."""

    framework: str | None = None
    hooks: list[str] | None = None
    samples_from: str | None = None
    planned_steps: Count | None = None
    """The steps of the whole training by its framework; None if that does not know them."""
    unknown: dict[str, str] | None = None
    ran: dict[str, Any] | None = None
    suppressed: list[str] | None = None
    limit_peak_bytes: Count | None = None
    widths: BatchWidths | None = None
    evaluation_seconds: Bounded | None = None


class OverflowLine(RankLine, frozen=True, kw_only=True, tag="overflow"):
    """A step skipped by fp16's loss scaler, and the scale then."""

    step: Count | None = None
    scale: float | None = None


class TroubleLine(RankLine, frozen=True, kw_only=True, tag="trouble"):
    """A failure beside the training, which goes on."""

    detail: str | None = None


class IgnoredStopLine(RankLine, frozen=True, kw_only=True, tag="ignored_stop"):
    """A user's own script trained on after the last step asked for."""

    step: Count | None = None


class SignalLine(RankLine, frozen=True, kw_only=True, tag="signal"):
    """The rank ends on request, by SIGTERM."""

    phase: str | None = None
    step: Count | None = None


class ExceptionLine(RankLine, frozen=True, kw_only=True, tag="exception"):
    """The exception that ended the rank, with the memory it held and what was free then."""

    phase: str | None = None
    step: Count | None = None
    type: str | None = None
    message: str | None = None
    chain: list[dict[str, str]] | None = None
    traceback: str | None = None
    is_oom: bool | None = None
    held_bytes: Count | None = None
    free_bytes: Count | None = None


class InvalidLine(RankLine, frozen=True, kw_only=True, tag="invalid"):
    """The input that the worker refused."""

    message: str | None = None
    key: str | None = None
    allowed: list[str] | None = None
    nearest: str | None = None


class FinishedLine(RankLine, frozen=True, kw_only=True, tag="finished"):
    """The rank has finished its training."""

    step: Count | None = None


EndLine = FinishedLine | ExceptionLine | InvalidLine | SignalLine
"""The kinds that record the end of a rank."""
WorkerLine = (
    StartedLine
    | PhaseLine
    | DataLine
    | CpuLine
    | ActualLine
    | ScriptLine
    | OverflowLine
    | TroubleLine
    | IgnoredStopLine
    | EndLine
)


def newest_of_first_rank(worker_lines: Mapping[int, Sequence[WorkerLine]], kind: type[T]) -> T | None:
    """The last line of this kind of the lowest rank that wrote one; None when no rank did."""
    lines = (newest(worker_lines[rank], kind) for rank in sorted(worker_lines))
    return next((line for line in lines if line is not None), None)


def error_of(line: ExceptionLine | InvalidLine, rank: int, phase: str | None = None) -> RunError:
    """The failure that a rank recorded; in the `phase` that it had entered, if the line names none."""
    if isinstance(line, ExceptionLine):
        phase, chain = line.phase or phase, line.chain or []
        return RunError(rank=rank, phase=phase, type=line.type, message=line.message, chain=chain)
    fields = {name: getattr(line, name) for name in ("message", "key", "allowed", "nearest")}
    return RunError(rank=rank, phase=phase, type="InvalidInput", **fields)


class WorkerTail(Tail[WorkerLine]):
    """Follows the lines of one rank. A kind of a newer version, or of a warm process's answers, has no record here."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, WorkerLine)  # type: ignore[arg-type]

    def decode(self, line: bytes) -> WorkerLine | None:
        """The typed line; None for one of an unknown kind. Raises msgspec.DecodeError for a damaged one."""
        try:
            return super().decode(line)
        except msgspec.ValidationError:
            if msgspec.json.decode(line, type=_Kind).kind not in _KINDS:
                return None
            raise


class _Kind(msgspec.Struct):
    kind: str


_KINDS = {line_type.__struct_config__.tag for line_type in get_args(WorkerLine)}


class WarmOrder(msgspec.Struct, frozen=True, kw_only=True):
    """An order to a warm process: to probe a batch size, to try the values of `knobs`, or to end."""

    do: str
    """probe, trial or end."""
    batch_size: int = 0
    """The size to probe; unused by a trial."""
    knobs: RecordedKnobs = {}
    """The values to try, with `untimed` and `more`; unused by a probe."""
    untimed: int = 2
    """First steps, whose memory is measured."""
    steps: int = 0
    """Steps of a probe, or steps of a trial whose time is measured."""
    more: bool = False
    """True if the last trial goes on with further timed steps, and no untimed ones."""


def read_knobs_tried(control: Path, run: RunFile | None) -> list[RecordedKnobs]:
    """Knobs of each probe or trial in a run of a search, oldest first; empty for a run of another role.

    A script's trial tries the knobs of its run. A warm process tries those of its orders; an order is written before
    the process begins with it, so the last one is where the process ended.
    """
    if run is None or run.role not in WARM_ROLES:
        return []
    if run.script is not None:
        return [dict(run.knobs)]
    try:
        orders, _ = read_all(control, WarmOrder)
    except OSError:
        return []
    if run.role == PROBE:
        return [{"batch_size": order.batch_size} for order in orders if order.do == PROBE]
    return [order.knobs for order in orders if order.do == TRIAL and not order.more]


def batch_sizes(tried: Iterable[Mapping[str, Any]]) -> list[int]:
    """The batch size of each probe or trial of a warm process, by their knobs."""
    return [knobs["batch_size"] for knobs in tried if "batch_size" in knobs]


class WarmLine(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's line: of kind ready (for orders), started, or the answer to the order of this `number` (from 1).

    An answer has the kind of its order. `outcome` is fits or oom of a probe; measured, oom or failed of a trial.
    """

    t_ns: Count
    kind: str
    pid: Count | None = None
    number: int | None = None
    outcome: str | None = None
    rank: int | None = None
    phase: str | None = None
    """The phase in which an exception ended the process; None without one."""
    message: str | None = None
    seconds: float | None = None
    """Time to the answer."""
    samples: Count | None = None
    """This rank's samples in one step."""
    step_ms: list[float] = []
    """Timed steps."""
    peak_allocated_bytes: Count | None = None
    """Peaks of the untimed steps on a CPU, of all steps on a GPU; None for `more` steps on a CPU, and under malloc
    settings of the user's own."""
    peak_reserved_bytes: Count | None = None
    available_bytes: Count | None = msgspec.field(default=None, name="room_bytes")
    """Available memory of the rank when it was ready, or before the probe."""
    # Of a probe alone.
    phase_peaks: dict[str, Count] = {}
    limit_peak_bytes: Count | None = None
    available_after_bytes: Count | None = msgspec.field(default=None, name="room_after_bytes")
    """Available memory of the rank after the probe."""
    alloc_retries: Count | None = None
    # Of a trial alone.
    tokens: Count | None = None
    """Mean number of this rank's tokens in one step, without padding."""
    data_ms: list[float | None] = []
    """The wait for data in each timed step."""
    optimizer_ms: list[float | None] = []
    """The optimizer's part of each timed step; empty of a worker that does not write it."""
    losses: list[float | None] = []
    """Losses of the timed steps; None for one that is not finite."""
    loss_not_finite: bool = False

    def steps(self) -> list[Step]:
        """The timed steps of a trial, as if each had been recorded, the last at the time of this line."""
        end_ns, steps = self.t_ns, []
        for number in reversed(range(len(self.step_ms))):
            data_ms, optimizer_ms = (next(iter(part[number:]), None) for part in (self.data_ms, self.optimizer_ms))
            step = Step(t_ns=max(0, end_ns), step=number, step_ms=self.step_ms[number], tokens=self.tokens)
            steps.append(msgspec.structs.replace(step, data_ms=data_ms, optimizer_ms=optimizer_ms))
            end_ns = step.begin_ns
        return steps[::-1]

    @property
    def ended_process(self) -> bool:
        """True if the process ended with this answer, as by an OOM: other ranks may not answer."""
        return self.number is not None and self.phase is not None


COLD = "cold"
"""A best-fit search's run of one candidate in a fresh process: a race, a confirmation, a run under the memory limit, or
one with a knob set back."""
WARM_ROLES = (PROBE, TRIAL)
"""Processes in which a search tries sizes or candidates; lists of runs leave them out."""
