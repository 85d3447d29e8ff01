"""What this machine's own runs took beyond their prediction: kernel workspaces, fragmentation, the CUDA context.

A finished run leaves, for its trace, strategy and number of ranks, the difference at each phase's peak; later
predictions of the same on the same device add it. One that ran out of memory leaves under which limit, and a search
what that counted. It is kept in the home, by the device's name.
"""

from __future__ import annotations

import fcntl
import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.memory.ran_out import RanOut, counted_bytes, kept, limit_of, ran_out
from trainfast_runner.records.home import home_directory
from trainfast_runner.records.json_lines import write_atomically
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_records import RunRecords

CORRECTIONS_FILE = "memory_corrections.json"
MOST_KEPT = 500
Kept = TypeVar("Kept")
FEWEST_STEPS = 2
"""The first step has no optimizer states before its update."""
MOST_BEYOND = 0.5
MOST_BEYOND_BYTES = 512 << 20
"""Share of the traced peak, and bytes, of which no workspace and no fragmentation takes more than both: something else
ran than was traced."""


class Correction(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that `run_id` took beyond the traced peak, by phase; negative where it took less.

    `step_bytes` is the traced peak of its forward and backward: what it took beyond grows with that.
    """

    run_id: str
    beyond_bytes: dict[str, int]
    step_bytes: int | None = None

    def share(self, step_bytes: float) -> float:
        """How much of it a step of this size takes: a smaller one less, a larger one no more than was seen."""
        return 1.0 if not self.step_bytes else min(1.0, step_bytes / self.step_bytes)


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """One device's: `context_bytes` outside of the allocator, and by `case` what its runs said of the next ones."""

    device: str = "cpu"
    """Its kind: cpu or cuda."""
    context_bytes: int | None = None
    corrections: dict[str, Correction] = {}
    ran_out: dict[str, list[RanOut]] = {}
    """Runs that ran out of memory under a limit, by the same cases."""
    counted_bytes: dict[str, int] = {}
    """What a limit of a CPU counted beyond the peak, as a search saw it."""


def case(trace: str, knobs: Mapping[str, Any], ranks: int) -> str:
    """What a correction holds for: compiled, or by another engine, the same step takes other temporary bytes."""
    return "/".join([trace, *(str(knobs.get(name)) for name in ("strategy", "engine", "compile")), str(ranks)])


def read(home: Path | None = None) -> dict[str, Machine]:
    """By the name of the device; a damaged file or one of nobody is none."""
    return _read(home)[0]


def trouble(home: Path | None = None) -> str | None:
    """In a line, why what is kept in the home cannot be read; None where it can be, or there is nothing."""
    return _read(home)[1]


def _read(home: Path | None) -> tuple[dict[str, Machine], str | None]:
    try:
        file = (home or home_directory()) / CORRECTIONS_FILE
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Machine]), None
    except (FileNotFoundError, UserError):
        return {}, None
    except (OSError, msgspec.DecodeError) as error:
        words = error.strerror if isinstance(error, OSError) else str(error)
        return {}, f"{file} cannot be read ({words}): nothing is corrected by earlier runs until another one ends"


def of_device(device: str, gpu: str | None = None, home: Path | None = None) -> Machine:
    """What is known of a device, cpu or cuda; of the only GPU there is anything of, where none is named."""
    known = read(home)
    if device != "cuda":
        return known.get(_cpu(), Machine())
    if gpu is not None:
        return known.get(gpu, Machine())
    gpus = [machine for name, machine in known.items() if machine.device == "cuda"]
    return gpus[0] if len(gpus) == 1 else Machine()


@functools.cache
def _cpu() -> str:
    from trainfast_runner.machine.calibration import cpu_name

    return cpu_name()


def learn(home: Path, records: RunRecords, result: Result) -> None:
    """Keep what a finished run took beyond its trace, and under which limit one ran out of memory.

    Nothing where it was not predicted or not measured. Raises OSError where the home cannot be written.
    """
    run = records.run
    trace = None if run is None else (run.predicted or {}).get("trace")
    if run is None or trace is None:
        return
    beyond, failed = _beyond(records, result), ran_out(records, result)
    counted = counted_bytes(home / "runs" / run.run_id, run)
    if not beyond and failed is None and counted is None:
        return
    name = run.device_names[0] if run.device_names else "GPU" if run.device == "cuda" else _cpu()
    where = case(str(trace), run.knobs, run.world_size)
    with _alone(home):
        known = read(home)
        machine = known.get(name, Machine())
        if beyond:
            machine = _measured(machine, where, records, result, beyond)
        if failed is not None:
            those = kept(machine.ran_out.get(where, []), failed)
            machine = msgspec.structs.replace(machine, ran_out=_with(machine.ran_out, where, those))
        if counted is not None:
            machine = msgspec.structs.replace(machine, counted_bytes=_with(machine.counted_bytes, where, counted))
        known[name] = msgspec.structs.replace(machine, device=run.device)
        write_atomically(home / CORRECTIONS_FILE, msgspec.json.encode(known))


def _measured(machine: Machine, where: str, records: RunRecords, result: Result, beyond: dict[str, int]) -> Machine:
    """With what a finished run took beyond its trace, and without what it refutes."""
    run = records.run
    assert run is not None
    traced = (run.predicted or {})["traced_bytes"]
    learnt = Correction(run_id=run.run_id, beyond_bytes=beyond, step_bytes=traced.get("forward_backward"))
    limit, those = limit_of(run), machine.ran_out.get(where, [])
    if limit is not None:
        those = [one for one in those if not one.is_refuted_by(limit, max(traced.values()))]
    return msgspec.structs.replace(
        machine,
        context_bytes=_context(records, result) or machine.context_bytes,
        corrections=_with(machine.corrections, where, learnt),
        ran_out=_with(machine.ran_out, where, those) if where in machine.ran_out else machine.ran_out,
    )


def _with(found: dict[str, Kept], where: str, new: Kept) -> dict[str, Kept]:
    """With one more as the newest, and as many of the others as are kept."""
    others = {case: one for case, one in found.items() if case != where}
    return dict([*others.items(), (where, new)][-MOST_KEPT:])


def _beyond(records: RunRecords, result: Result) -> dict[str, int]:
    """By phase; nothing of a run that says nothing of the next: which took something else than was traced, or less."""
    run = records.run
    if run is None or result.state != "finished" or run.role == "probe":
        return {}
    if run.data.get("samples", "packed") != "packed" or min(map(len, records.steps.values()), default=0) < FEWEST_STEPS:
        return {}
    traced = (run.predicted or {}).get("traced_bytes")
    if not isinstance(traced, dict):
        return {}
    beyond = {
        phase: peak - traced[phase] for phase, peak in _peaks(records).items() if isinstance(traced.get(phase), int)
    }
    if any(abs(more) > max(MOST_BEYOND * traced[phase], MOST_BEYOND_BYTES) for phase, more in beyond.items()):
        return {}
    return beyond


@contextmanager
def _alone(home: Path) -> Iterator[None]:
    """Of two runs that end together neither forgets the other's."""
    fd = os.open(home / f"{CORRECTIONS_FILE}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _peaks(records: RunRecords) -> dict[str, int]:
    """Bytes at each phase's peak on the fullest rank, over all steps."""
    found: dict[str, int] = {}
    for rank in records.steps:
        for phase, peak in records.totals(rank).phase_peaks.items():
            found[phase] = max(found.get(phase, 0), peak)
    return found


def _context(records: RunRecords, result: Result) -> int | None:
    """What the device held beyond what was used before and what torch reserved: context, kernels, NCCL.

    Told by the samples since torch reserved the most: those of a short run may all be from before.
    """
    run, reserved = records.run, result.memory.peak_reserved_bytes
    if run is None or run.device != "cuda" or reserved is None or not result.conditions.clean:
        return None
    steps = [step for of in records.steps.values() for step in of]
    since_ns = min((step.t_ns for step in steps if step.peak_reserved_bytes == reserved), default=None)
    if since_ns is None:
        return None
    until_ns = max(step.t_ns for step in steps)
    used = [
        sample.memory_used_bytes
        for uuid in run.device_uuids
        for t_ns, sample in records.devices.get(uuid, ())
        if since_ns <= t_ns <= until_ns and sample.memory_used_bytes is not None
    ]
    before = max(run.used_before_bytes.values(), default=0)
    return max(0, max(used, default=0) - before - reserved) or None
