"""Corrections of predictions by this machine's own runs: kernel workspaces, fragmentation, the CUDA context.

A finished run leaves, for its trace, strategy and number of ranks, the difference at each phase's peak, which later
predictions of the same case add. The run with the largest step stands, and the newest with a smaller one: the
prediction of the same settings stays the same from run to run. Kept in the home, by the device's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.machine.cpu import cpu_name
from trainfast_runner.records.home import home_directory
from trainfast_runner.records.json_lines import DAMAGE, read_regular, write_atomically
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_directory import RunRecords, locked
from trainfast_runner.records.worker_lines import WARM_ROLES
from trainfast_runner.worker.catalog import LEVERS

CORRECTIONS_FILE = "memory_corrections.json"
NOT_TRACED = (
    *(
        (entry.name, (value.name,), value.untraced)
        for entry in LEVERS.values()
        for value in entry.values
        if value.untraced
    ),
    ("engine", ("trainer",), "the Trainer's own memory"),
    ("precision", ("fp8",), "the float8 copies of a product's operands"),
)
"""Knobs, their values, and the memory of these that no trace shows."""


class Correction(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a run took beyond the traced peak."""

    run_id: str
    beyond_bytes: dict[str, int]
    """Bytes by phase; negative if the run took less."""
    step_bytes: int | None = None
    """The traced peak of forward and backward, with which the correction grows."""
    smaller: Correction | None = None
    """The correction by the newest run of a smaller step; None without one."""

    def beyond(self, phase: str, knobs: Mapping[str, Any], step_bytes: float) -> float:
        """The bytes beyond this phase of a step of this size: a share for a smaller one, between two runs on a line.

        All of them too for a run that keeps untraced memory, whatever the size of the step.
        """
        own_bytes, smaller, own_step_bytes = self.beyond_bytes.get(phase, 0), self.smaller, self.step_bytes or 0
        if smaller is not None and step_bytes < own_step_bytes:
            smaller_bytes, from_bytes = smaller.beyond(phase, knobs, step_bytes), smaller.step_bytes or 0
            part = max(0.0, (step_bytes - from_bytes) / (own_step_bytes - from_bytes))
            return smaller_bytes + part * (own_bytes - smaller_bytes)
        keeps_untraced = any(knobs.get(name) in values for name, values, _ in NOT_TRACED)
        return own_bytes if keeps_untraced or not own_step_bytes else own_bytes * min(1.0, step_bytes / own_step_bytes)

    def joined(self, known: Correction | None) -> Correction:
        """This newer correction and the known one, the larger step first; a known one of the same step stands."""
        if known is None or self.step_bytes == known.step_bytes:
            return known or self
        smaller, larger = sorted((self, known), key=lambda one: one.step_bytes or 0)
        return msgspec.structs.replace(larger, smaller=msgspec.structs.replace(smaller, smaller=None))


class DeviceCorrections(msgspec.Struct, frozen=True, kw_only=True):
    """The corrections of one device: `context_bytes` outside of the allocator, and corrections by `correction_key`."""

    device: str = "cpu"
    """The device's kind: cpu or cuda."""
    context_bytes: int | None = None
    by_case: dict[str, Correction] = msgspec.field(default_factory=dict, name="corrections")


def correction_key(trace: str, knobs: Mapping[str, Any], ranks: int) -> str:
    """The key of a correction: compiled, or by another engine, the same step takes other temporary bytes."""
    always = ("strategy", "engine", "compile")
    others = [
        f"{name}={knobs[name]}" for name, values, _ in NOT_TRACED if name not in always and knobs.get(name) in values
    ]
    return "/".join([trace, *(str(knobs.get(name)) for name in always), *others, str(ranks)])


def read_corrections(home: Path | None = None) -> dict[str, DeviceCorrections]:
    """Read the corrections by device name; empty if there is no file or it is damaged."""
    try:
        file = (home or home_directory()) / CORRECTIONS_FILE
        return msgspec.json.decode(read_regular(file), type=dict[str, DeviceCorrections])
    except (OSError, UserError, *DAMAGE):
        return {}


def read_device_corrections(device: str, gpu: str | None = None, home: Path | None = None) -> DeviceCorrections:
    """The corrections of a device, cpu or cuda; when no GPU is named, of the only one that has any."""
    devices = read_corrections(home)
    if device != "cuda":
        return devices.get(cpu_name(), DeviceCorrections())
    if gpu is not None:
        return devices.get(gpu, DeviceCorrections())
    gpus = [corrections for corrections in devices.values() if corrections.device == "cuda"]
    return gpus[0] if len(gpus) == 1 else DeviceCorrections()


MAX_KEPT = 500
"""Chosen, not measured: most corrections of a device, since every prediction reads the file."""
FEWEST_STEPS = 2
"""Fewest steps of a run that corrects: the first step has no optimizer states before its update."""
LOCK_WITHIN_S = 2.0
"""Chosen, not measured: a correction is given up rather than keep the run's result waiting longer."""
MAX_BEYOND = 0.5
MAX_BEYOND_BYTES = 512 << 20
"""Share of a traced peak, and bytes: a run whose peak is off by more than both took another step."""


def record_correction(home: Path, records: RunRecords, result: Result) -> None:
    """Keep the bytes a finished run took beyond its trace, unless a run with the same step of the same case is known.

    Does nothing for a run without prediction or measurement. Raises OSError when the home cannot be written, or its
    lock is not free in time.
    """
    run = records.run
    if run is None or run.predicted is None or run.role in WARM_ROLES:
        return
    beyond_bytes = _beyond_bytes(records, result)
    if not beyond_bytes:
        return
    name = run.device_names[0] if run.device_names else "GPU" if run.device == "cuda" else cpu_name()
    key = correction_key(run.predicted.trace, run.knobs, run.world_size)
    step_bytes = run.predicted.traced_bytes.get("forward_backward")
    # Two runs may end together.
    with locked(home / f"{CORRECTIONS_FILE}.lock", within_s=LOCK_WITHIN_S):
        devices = read_corrections(home)
        known = devices.get(name, DeviceCorrections())
        by_case = dict(known.by_case)
        newest = Correction(run_id=run.run_id, beyond_bytes=beyond_bytes, step_bytes=step_bytes)
        by_case[key] = newest.joined(by_case.pop(key, None))
        devices[name] = DeviceCorrections(
            device=run.device,
            context_bytes=_context_bytes(records, result) or known.context_bytes,
            by_case=dict(list(by_case.items())[-MAX_KEPT:]),
        )
        write_atomically(home / CORRECTIONS_FILE, msgspec.json.encode(devices))


def _beyond_bytes(records: RunRecords, result: Result) -> dict[str, int]:
    """Bytes beyond the trace at each phase's peak on the fullest rank; empty if it says nothing about the next run."""
    run = records.run
    if run is None or run.predicted is None or result.state != "finished":
        return {}
    fewest_steps = min(map(len, records.steps.values()), default=0)
    if run.knobs.get("samples", "packed") != "packed" or fewest_steps < FEWEST_STEPS:
        return {}
    peaks: dict[str, int] = {}
    for rank in records.steps:
        for phase, peak in records.totals(rank).phase_peaks.items():
            peaks[phase] = max(peaks.get(phase, 0), peak)
    traced_bytes = run.predicted.traced_bytes
    beyond_bytes = {phase: peak - traced_bytes[phase] for phase, peak in peaks.items() if phase in traced_bytes}
    if any(abs(size) > max(MAX_BEYOND * traced_bytes[phase], MAX_BEYOND_BYTES) for phase, size in beyond_bytes.items()):
        return {}
    return beyond_bytes


def _context_bytes(records: RunRecords, result: Result) -> int | None:
    """Bytes of the device outside torch's allocator: context, kernels, NCCL; None when not measured.

    Only samples since torch reserved the most count: a short run may have only older ones.
    """
    run, reserved_bytes = records.run, result.memory.peak_reserved_bytes
    if run is None or run.device != "cuda" or reserved_bytes is None or not result.conditions.clean:
        return None
    steps = [step for steps_of_rank in records.steps.values() for step in steps_of_rank]
    since_ns = min((step.t_ns for step in steps if step.peak_reserved_bytes == reserved_bytes), default=None)
    if since_ns is None:
        return None
    until_ns = max(step.t_ns for step in steps)
    used_bytes = [
        sample.memory_used_bytes
        for uuid in run.device_uuids
        for t_ns, sample in records.device_samples.get(uuid, ())
        if since_ns <= t_ns <= until_ns and sample.memory_used_bytes is not None
    ]
    before_bytes = max(run.used_before_bytes.values(), default=0)
    return max(0, max(used_bytes, default=0) - before_bytes - reserved_bytes) or None
