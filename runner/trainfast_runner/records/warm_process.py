"""The lines between a search and its warm process: orders in `control.jsonl`, answers in `worker.jsonl`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from trainfast_runner.records.json_lines import Tail, read_all
from trainfast_runner.records.run_file import RecordedKnobs, RunFile
from trainfast_runner.records.run_lines import Count
from trainfast_runner.worker.shared.words import PROBE, TRIAL


class ProbeOrder(msgspec.Struct, frozen=True, kw_only=True):
    """An order to take `steps` optimizer steps at this batch size."""

    do: str
    """Always probe."""
    batch_size: int = 0
    steps: int = 0


class TrialOrder(msgspec.Struct, frozen=True, kw_only=True):
    """An order to try the values of `knobs`."""

    do: str
    """Always trial."""
    knobs: RecordedKnobs = {}
    untimed: int = 2
    """First steps, whose memory is measured."""
    steps: int = 4
    """Steps after them, whose time is measured."""
    more: bool = False
    """True if the last trial goes on with further timed steps, and no untimed ones."""


class EndOrder(msgspec.Struct, frozen=True):
    """The order to end the process."""

    do: str = "end"


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
        if run.role == PROBE:
            sizes, _ = read_all(control, ProbeOrder)
            return [{"batch_size": order.batch_size} for order in sizes if order.do == PROBE]
        trials, _ = read_all(control, TrialOrder)
    except OSError:
        return []
    return [order.knobs for order in trials if order.do == TRIAL and not order.more]


def batch_sizes(tried: Iterable[Mapping[str, Any]]) -> list[int]:
    """The batch size of each probe or trial of a warm process, by their knobs."""
    return [knobs["batch_size"] for knobs in tried if "batch_size" in knobs]


class WarmLine(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's line: of kind ready (for orders), started, or the answer to the order of this `number` (from 1)."""

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
    samples: Count | None = None
    step_ms: list[float] = []
    peak_allocated_bytes: Count | None = None
    peak_reserved_bytes: Count | None = None
    available_bytes: Count | None = msgspec.field(default=None, name="room_bytes")
    """Available memory of the rank when it was ready, or before the probe."""

    @property
    def ended_process(self) -> bool:
        """True if the process ended with this answer, as by an OOM: other ranks may not answer."""
        return self.number is not None and self.phase is not None


class ProbeLine(WarmLine, frozen=True, kw_only=True):
    """A rank's answer to a `ProbeOrder`. `outcome` is fits or oom."""

    phase_peaks: dict[str, Count] = {}
    limit_peak_bytes: Count | None = None
    available_after_bytes: Count | None = msgspec.field(default=None, name="room_after_bytes")
    """Available memory of the rank after the probe."""
    alloc_retries: Count | None = None


class TrialLine(WarmLine, frozen=True, kw_only=True):
    """A rank's answer to a `TrialOrder`. `outcome` is measured, oom or failed.

    `samples` are this rank's in one step, `step_ms` those of the timed steps, `seconds` the time to the answer. Peaks
    are those of the untimed steps on a CPU, of all steps on a GPU; None for `more` steps on a CPU, and under malloc
    settings of the user's own.
    """

    tokens: Count | None = None
    """Mean number of this rank's tokens in one step, without padding."""
    data_ms: list[float | None] = []
    """The wait for data in each timed step."""
    untimed_ms: list[float] = []
    switch_s: float | None = None
    """Seconds from the order to the first step."""
    losses: list[float | None] = []
    """Losses of the timed steps; None for one that is not finite."""
    loss_not_finite: bool = False


class WarmTail(Tail[WarmLine]):
    """Follows the lines of one rank, each decoded by its kind."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, WarmLine)
        self._answers: dict[str, msgspec.json.Decoder[ProbeLine] | msgspec.json.Decoder[TrialLine]] = {
            PROBE: msgspec.json.Decoder(ProbeLine),
            TRIAL: msgspec.json.Decoder(TrialLine),
        }

    def decode(self, line: bytes) -> WarmLine:
        """The typed line. Raises msgspec.DecodeError for a damaged one."""
        decoded = super().decode(line)
        answer_decoder = self._answers.get(decoded.kind)
        return decoded if answer_decoder is None else answer_decoder.decode(line)


COLD = "cold"
"""A best-fit search's run of one candidate in a fresh process: a race, a confirmation, a run under the memory limit, or
one with a knob set back."""
WARM_ROLES = (PROBE, TRIAL)
"""Processes in which a search tries sizes or candidates; lists of runs leave them out."""
