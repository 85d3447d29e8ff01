"""A run directory read as it grows, for a screen that shows the run live or long after.

`Follower.poll` reads only what is new since the last call, bounded in time and memory, and tolerates files that are
missing, cut short or damaged.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from trainfast_runner.errors import highest
from trainfast_runner.records import run_directory, worker_lines
from trainfast_runner.records.capped_file import OUTPUT_FILE, LogTail, RecordTail
from trainfast_runner.records.home import Home
from trainfast_runner.records.json_lines import Tail, open_regular
from trainfast_runner.records.result import LOSSES_IN_A_MEAN, Diagnosis, Result, SteadyState, mean_loss
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.records.run_lines import Event, Step
from trainfast_runner.records.tick import Tick
from trainfast_runner.results.bottleneck import LiveDiagnosis
from trainfast_runner.results.device_conditions import StepConditions, StepJoin
from trainfast_runner.running.present_state import StateEvents, run_state
from trainfast_runner.running.settling import recover_result
from trainfast_runner.settings.device_counts import ranks_with_samples
from trainfast_runner.worker.shared.words import CONTROL_FILE


@dataclass(frozen=True, slots=True)
class Rates:
    """Throughput of each step, by its number, summed over data-parallel ranks; all have one length. Newest last.

    `tokens_per_s` are None for a model without tokens.
    """

    steps: tuple[int, ...] = ()
    times_ns: tuple[int, ...] = ()
    samples_per_s: tuple[float, ...] = ()
    tokens_per_s: tuple[float | None, ...] = ()


class SummedRates:
    """Adds up the ranks' rates of a step once all have written it; keeps the newest `keep` steps, or all."""

    def __init__(self, keep: int | None) -> None:
        self._keep = keep
        self._summed: deque[tuple[int, int, float, float | None]] = deque(maxlen=keep)
        """Number and end of a step, its samples and tokens a second."""
        self._waiting: dict[int, list[Step]] = {}

    def add(self, rank: int, steps: Iterable[Step], sampling_ranks: int) -> None:
        """Add steps of a rank, in a run whose first `sampling_ranks` ranks have samples of their own."""
        if rank >= sampling_ranks:
            return
        for step in steps:
            if step.step_ms <= 0 or step.samples is None:
                continue
            steps_of_ranks = self._waiting.setdefault(step.step, [])
            steps_of_ranks.append(step)
            if len(steps_of_ranks) < sampling_ranks:
                continue
            samples_per_s = sum(1e3 * (one.samples or 0) / one.step_ms for one in steps_of_ranks)
            tokens_per_s = None  # for a model without tokens
            if all(one.tokens is not None for one in steps_of_ranks):
                tokens_per_s = sum(1e3 * (one.tokens or 0) / one.step_ms for one in steps_of_ranks)
            ended_ns = max(one.t_ns for one in steps_of_ranks)
            self._summed.append((step.step, ended_ns, samples_per_s, tokens_per_s))
            del self._waiting[step.step]
        if self._keep is not None and len(self._waiting) > self._keep:
            # A rank has stopped writing: the steps of the others alone are no throughput of the run.
            for number in sorted(self._waiting)[: -self._keep]:
                del self._waiting[number]

    def rates(self) -> Rates:
        """Return the rates of the steps kept."""
        return Rates(*zip(*self._summed, strict=True))


STEPS_KEPT = 4000
TICKS_KEPT = 1800
CONDITIONS_KEPT = 600
EVENTS_KEPT = 1000
RECENT_TELEMETRY_BYTES = 24 << 20
"""The end of longer telemetry that is read: more than is kept, with 12 kB a tick of eight GPUs."""
WINDOW_BYTES = 4 << 20
"""Telemetry read in one poll, which bounds the memory for it."""
NEWEST_TICK_BYTES = 64 << 10
"""The end of another node's telemetry that is read: a tick of eight GPUs has 12 kB."""
RECENT_BYTES = 4 << 20
"""The end of any other longer file that is read: more than is kept."""
FIRST_STEPS_BYTES = 32 << 10
"""Head of a `steps*.jsonl` that holds the first losses, and the peaks of a training on the CPU."""


@dataclasses.dataclass(frozen=True, slots=True)
class RunSnapshot:
    """The state and records of a run at one moment. `log` is untrusted text of the training."""

    directory: Path
    run_file: RunFile | None = None
    state: str = "starting"
    supervised: bool = True
    """False while the run is live without its supervisor."""
    reason: str = ""
    stop_deadline_ns: int | None = None
    """Time of SIGKILL after a requested stop; CLOCK_MONOTONIC."""
    result: Result | None = None
    steps: tuple[Step, ...] = ()
    """Rank 0's steps, newest last, at most `STEPS_KEPT`."""
    first_loss: float | None = None
    """Mean of the first five recorded losses."""
    peak_allocated_bytes: int | None = None
    """Peak of the worst rank."""
    rates: Rates = dataclasses.field(default_factory=Rates)
    ticks: tuple[Tick, ...] = ()
    """Newest last, at most `TICKS_KEPT`."""
    events: tuple[Event, ...] = ()
    """Newest last, at most `EVENTS_KEPT`."""
    phase: str = ""
    detail: str = ""
    synthetic: bool | None = None
    planned_steps: int | None = None
    """The steps of the whole training that a script's framework knows of."""
    actual: worker_lines.ActualLine | None = None
    """The settings that really ran, as rank 0 read them from the live objects."""
    error: worker_lines.ExceptionLine | worker_lines.InvalidLine | None = None
    """The first failure that a rank recorded."""
    log: tuple[str, ...] = ()
    unreadable_lines: int = 0
    conditions: tuple[StepConditions, ...] = ()
    """The watched devices' conditions in the newest steps, oldest first, at most `CONDITIONS_KEPT`. A step is joined
    once a sample after its end has come, so the last second of steps is missing."""
    diagnosis: tuple[Diagnosis, ...] = ()
    """The bottlenecks, the costliest first: of a live run now, of an ended run as a whole."""
    steady: SteadyState = dataclasses.field(default_factory=SteadyState)
    """The warm-up: of a live run's newest steps, of all steps of an ended run."""
    other_nodes: tuple[tuple[str, Tick], ...] = ()
    """The other nodes of the run, each with its host and newest tick."""
    tried: tuple[dict[str, Any], ...] = ()
    """Knobs of each trial of a search's warm process, the newest last."""

    @property
    def run_id(self) -> str:
        """The name of the directory."""
        return self.directory.name

    @property
    def is_live(self) -> bool:
        """True if anything of the run may still be running."""
        return self.state not in run_directory.END_STATES

    @property
    def trains_on_cpu(self) -> bool:
        """True if the run takes steps now on the CPU, which this program needs too."""
        return self.state == "running" and self.run_file is not None and self.run_file.device == "cpu"


T = TypeVar("T")


class FollowedFile(Generic[T]):
    """Follow a file from at most `recent_bytes` before its end, and keep its newest `keep` records."""

    def __init__(self, tail: Tail[T], keep: int = 0, recent_bytes: float = RECENT_BYTES) -> None:
        self.kept: deque[T] = deque(maxlen=keep)
        self.tail = tail
        # Without the file the tail waits for it.
        with suppress(OSError), os.fdopen(open_regular(tail.path), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            if size > recent_bytes:
                file.seek(size - int(recent_bytes))
                file.readline()
                tail.offset = file.tell()

    def read(self) -> list[T]:
        """Return the new records, after adding them to those kept; empty if the file cannot be read."""
        try:
            records = self.tail.new()
        except OSError:
            return []
        self.kept.extend(records)
        return records


class Follower:
    """Reads one run directory, a bit at each `poll`. Not safe to share between threads."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._snapshot = RunSnapshot(directory)
        """The snapshot so far: `run.json` and the ranks' lines are added as they are read, `poll` replaces the rest."""
        self._steps: deque[Step] = deque(maxlen=STEPS_KEPT)
        self._rates = SummedRates(STEPS_KEPT)
        self._step_files: dict[int, FollowedFile[Step]] = {}
        self._line_files: dict[int, FollowedFile[worker_lines.WorkerLine]] = {}
        self._first_losses: list[float] = []
        self._ticks = FollowedFile(
            RecordTail(directory / run_directory.TELEMETRY_FILE, Tick, WINDOW_BYTES), TICKS_KEPT, RECENT_TELEMETRY_BYTES
        )
        self._events = FollowedFile(Tail(directory / run_directory.EVENTS_FILE, Event), EVENTS_KEPT)
        self._state_events = StateEvents(directory)
        self._node_ticks: dict[int, FollowedFile[Tick]] = {}
        """The newest tick of each other node of the run."""
        self._join: StepJoin | None = None
        self._live = LiveDiagnosis()
        self._conditions: deque[StepConditions] = deque(maxlen=CONDITIONS_KEPT)
        self._log = LogTail(directory / OUTPUT_FILE)
        self._has_ended = False

    def poll(self) -> RunSnapshot:
        """Read new records and return everything known; a run that was left behind gets its result.

        Once a run has ended its last snapshot is kept.
        """
        if self._has_ended:
            return self._snapshot
        if self._snapshot.run_file is None:
            self._snapshot = dataclasses.replace(self._snapshot, run_file=run_directory.read_run_file(self.directory))
        # First the lock, then the state: the files read afterwards are at least as new as both.
        alive = run_directory.is_alive(self.directory)
        state = run_state(self.directory, self._snapshot.run_file, self._state_events)
        result = (
            recover_result(self.directory) if state.ended and not alive else run_directory.read_result(self.directory)
        )
        grew = self._read()
        # The supervisor records the end before it writes the result: while it lives, the result may still come.
        self._has_ended = (result is not None or (state.ended and not alive)) and not grew
        if self._join is not None:
            self._conditions.extend(self._join.joined(final=self._has_ended))
        previous = self._snapshot
        self._snapshot = dataclasses.replace(
            previous,
            state=result.state if result else state.state,
            supervised=state.supervised or state.ended or state.state == "starting",
            reason=(result.reason if result else state.reason) or "",
            stop_deadline_ns=state.stop_deadline_ns,
            result=result,
            steps=tuple(self._steps),
            rates=self._rates.rates(),
            ticks=tuple(self._ticks.kept),
            events=tuple(self._events.kept),
            synthetic=previous.synthetic if result is None else result.synthetic_data,
            log=self._log.lines,
            other_nodes=self._other_nodes(),
            unreadable_lines=sum(file.tail.unreadable for file in self._files()),
            conditions=tuple(self._conditions),
            diagnosis=tuple(result.diagnosis) if result else self._live.diagnosis,
            steady=result.conditions if result else self._live.steady,
            tried=tuple(worker_lines.read_knobs_tried(self.directory / CONTROL_FILE, previous.run_file)),
        )
        return self._snapshot

    def _read(self) -> bool:
        """Read all files; True if any gave something new."""
        grew = False
        for rank, path in run_directory.rank_files(self.directory, "steps").items():
            grew |= self._read_steps(rank, path)
        for rank, path in run_directory.rank_files(self.directory, "worker").items():
            if rank not in self._line_files:
                self._line_files[rank] = FollowedFile(worker_lines.WorkerTail(path), recent_bytes=math.inf)
            for line in self._line_files[rank].read():
                self._add_line(rank, line)
                grew = True
        events, ticks = self._events.read(), self._ticks.read()
        join = self._step_join()
        if join is not None:
            for tick in ticks:
                join.add_tick(tick.t_ns, tick.devices)
            if self._snapshot.run_file is not None and ticks:
                self._live.renew(self._snapshot.run_file, self._steps, self._ticks.kept, self._events.kept, join)
        return self._log.read() or grew or bool(events or ticks)

    def _other_nodes(self) -> tuple[tuple[str, Tick], ...]:
        """The hosts and newest ticks of the other nodes."""
        run, found = self._snapshot.run_file, []
        for node, asked in enumerate(run.nodes if run is not None else ()):
            if node == 0:
                continue
            if node not in self._node_ticks:
                path = run_directory.node_file(self.directory, run_directory.TELEMETRY_FILE, node)
                self._node_ticks[node] = FollowedFile(RecordTail(path, Tick), 1, NEWEST_TICK_BYTES)
            self._node_ticks[node].read()
            found += [(asked.host or f"node {node}", tick) for tick in self._node_ticks[node].kept]
        return tuple(found)

    def _files(self) -> list[FollowedFile[Any]]:
        return [*self._step_files.values(), *self._line_files.values(), self._ticks, self._events]

    def _step_join(self) -> StepJoin | None:
        """The join of this run's steps; None before `run.json` is there."""
        if self._join is None and self._snapshot.run_file is not None:
            self._join = StepJoin(
                self._snapshot.run_file.watch_uuids,
                used_uuids=self._snapshot.run_file.device_uuids,
                samples_factor=self._summed_ranks(),
                keep=TICKS_KEPT,
                keep_steps=CONDITIONS_KEPT,
            )
        return self._join

    def _read_steps(self, rank: int, path: Path) -> bool:
        """Read the new steps of a rank; True if there are any."""
        head: list[Step] = []
        if rank not in self._step_files:
            file = self._step_files[rank] = FollowedFile(RecordTail(path, Step))
            if file.tail.offset:
                # A training on the CPU has peaks in its first steps alone, which the end of a long file lacks.
                head = FollowedFile(RecordTail(path, Step, FIRST_STEPS_BYTES), recent_bytes=math.inf).read()
        steps = self._step_files[rank].read()
        all_steps = [*head, *steps]
        if not all_steps:
            return False
        snapshot = self._snapshot
        if rank == 0:
            if len(self._first_losses) < LOSSES_IN_A_MEAN:
                self._first_losses += [step.loss for step in all_steps if step.loss is not None]
                del self._first_losses[LOSSES_IN_A_MEAN:]
                snapshot = dataclasses.replace(snapshot, first_loss=mean_loss(self._first_losses))
            self._steps.extend(steps)
            if (join := self._step_join()) is not None:
                for step in steps:
                    join.add(step)
        self._live.add(rank, steps)
        peak_bytes = highest((snapshot.peak_allocated_bytes, *(step.peak_allocated_bytes for step in all_steps)))
        self._snapshot = dataclasses.replace(snapshot, peak_allocated_bytes=peak_bytes)
        self._rates.add(rank, steps, self._summed_ranks())
        return True

    def _summed_ranks(self) -> int:
        """Number of ranks with samples of their own; the others share rank 0's."""
        run = self._snapshot.run_file
        return 1 if run is None else ranks_with_samples(run)

    def _add_line(self, rank: int, line: worker_lines.WorkerLine) -> None:
        snapshot = self._snapshot
        match line:
            case worker_lines.ExceptionLine() | worker_lines.InvalidLine():
                if snapshot.error is None:
                    error = msgspec.structs.replace(line, rank=rank if line.rank is None else line.rank)
                    self._snapshot = dataclasses.replace(snapshot, error=error)
            case worker_lines.PhaseLine() if rank == 0:
                self._snapshot = dataclasses.replace(snapshot, phase=line.phase or "", detail=line.detail or "")
            case worker_lines.DataLine() if rank == 0:
                self._snapshot = dataclasses.replace(snapshot, synthetic=line.synthetic)
            case worker_lines.ScriptLine() if rank == 0:
                self._snapshot = dataclasses.replace(snapshot, planned_steps=line.planned_steps)
            case worker_lines.ActualLine() if rank == 0:
                self._snapshot = dataclasses.replace(snapshot, actual=line)


def newest_run(home: Home) -> Path | None:
    """The newest live run, else the newest of all, without runs of searches and unreadable ones; None without any."""
    every = (home.directory(run_id) for run_id in reversed(home.run_ids()))
    listed = filter(run_directory.is_listed, chain(home.live_directories(), every))
    runs = ((directory, run_directory.read_run_file(directory)) for directory in listed)
    return next((directory for directory, run in runs if run is None or run.role is None), None)
