"""The history: every run of a home as one row, from nothing but its small `result.json` once it has ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec.structs import replace

from trainfast_runner.records.home import Home
from trainfast_runner.records.json_lines import DAMAGE, read_regular
from trainfast_runner.records.result import Doubt, MemoryFigures, Result, RunConditions, StepCount, StepTime, Throughput
from trainfast_runner.records.run_directory import RESULT_FILE, read_run_file
from trainfast_runner.records.run_file import RecordedKnobs, ScriptFigures, name_of
from trainfast_runner.records.worker_lines import WARM_ROLES
from trainfast_runner.running.present_state import other_host, run_state
from trainfast_runner.running.settling import recover_result


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    """The part of `result.json` that a row has as it is."""

    preset: str = ""
    variant: str | None = None
    state: str
    reason: str = ""
    started_wall_ns: int | None = None
    seconds: float | None = None
    """Time of the whole run."""
    knobs: RecordedKnobs = {}
    overrides: dict[str, Any] = msgspec.field(default_factory=dict, name="changed")
    """Overrides of the preset (JSON `changed`)."""
    steps: StepCount = StepCount()
    synthetic_data: bool | None = None
    role: str | None = None
    """Role in its search: probe, proof, trial or cold; None for a run by itself."""


class RunRow(_Head, frozen=True, kw_only=True):
    """One run in a list; rates are a second and summed over data-parallel ranks."""

    run_id: str
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    step_ms_p50: float | None = None
    peak_allocated_bytes: int | None = None
    clean: bool = True
    doubts: list[Doubt] = []
    """The conditions that make the figures doubtful."""
    supervised: bool | None = None
    """None once a run has ended, False while it is live without its supervisor."""
    measured_under: str | None = None
    """The reason its speed ranks against no other, as `Result.measured_under`."""
    command: list[str] = []
    """The command of a script; empty for a preset's model."""
    number: int | None = None
    """The number of its launch; None for a run that this home did not launch."""
    host: str | None = None
    """The other machine that the run is on; None for one on this machine, and for an ended one."""

    @property
    def name(self) -> str:
        """The preset as it is written on the command line."""
        return name_of(self.preset, self.variant)


class ResultHead(_Head, frozen=True, kw_only=True):
    """The part of `result.json` that a row shows; decoding no more keeps 10,000 runs under a second."""

    throughput: Throughput = Throughput()
    step_ms: StepTime = StepTime()
    memory: MemoryFigures = MemoryFigures()
    conditions: RunConditions = RunConditions()
    doubts: list[Doubt] | None = None
    script: ScriptFigures | None = None


_decoder = msgspec.json.Decoder(ResultHead)


def iter_rows(home: Home, *, warm_processes: bool = False) -> Iterator[RunRow]:
    """Yield the rows, newest first; a caller that takes ten reads ten files.

    Runs in which a search only tried sizes or candidates are left out unless `warm_processes` is true.
    """
    numbers = home.launch_numbers()
    for run_id in reversed(home.run_ids()):
        row = _ended_row(home, run_id)
        if row is None and home.directory(run_id).is_dir():
            row = row_of(home, run_id)
        if row is not None and (warm_processes or row.role not in WARM_ROLES):
            yield replace(row, number=numbers.get(run_id))


def row_of(home: Home, run_id: str) -> RunRow:
    """The row of one run, live or ended."""
    directory = home.directory(run_id)
    row = _ended_row(home, run_id)
    if row is not None:
        return row
    result = recover_result(directory)
    if result is not None:
        return _row_of_head(result, run_id)
    run = read_run_file(directory)
    state = run_state(directory, run)
    return RunRow(
        run_id=run_id,
        preset=run.preset if run else "",
        variant=run.variant if run else None,
        state=state.state,
        reason=state.reason or "",
        started_wall_ns=run.clock.wall_ns if run else None,
        knobs=run.knobs if run else {},
        overrides=run.override_values() if run else {},
        clean=run.clean if run else True,
        role=run.role if run else None,
        command=run.script.command if run and run.script else [],
        host=None if state.ended else other_host(run),
        supervised=None if state.ended else state.supervised or state.state == "starting",
    )


def _ended_row(home: Home, run_id: str) -> RunRow | None:
    """The row of a `result.json`; None when there is none, or it is damaged."""
    try:
        head = _decoder.decode(read_regular(f"{home.runs}/{run_id}/{RESULT_FILE}"))
    except (OSError, *DAMAGE):
        return None
    return _row_of_head(head, run_id)


def _row_of_head(head: ResultHead | Result, run_id: str) -> RunRow:
    return RunRow(
        run_id=run_id,
        **{name: getattr(head, name) for name in _Head.__struct_fields__},
        doubts=head.doubts or [],
        samples_per_s=head.throughput.samples_per_s.typical,
        tokens_per_s=head.throughput.tokens_per_s.typical,
        step_ms_p50=head.step_ms.p50,
        peak_allocated_bytes=head.memory.peak_allocated_bytes,
        clean=head.conditions.clean,
        command=head.script.command if head.script is not None else [],
        measured_under=head.throughput.measured_under,
    )
