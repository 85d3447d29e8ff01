"""The end of a training as its supervisor saw it, and the verdict on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainfast_runner.machine.cgroup import oom_kills
from trainfast_runner.machine.processes import UnkillableProcess
from trainfast_runner.records.output_log import OUTPUT_FILE, read_log
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.records.run_records import RunRecords
from trainfast_runner.records.worker_lines import StartedLine
from trainfast_runner.results.ended_result import add_trouble
from trainfast_runner.results.verdict import EndFacts, Verdict, judge
from trainfast_runner.running.recovery import lost_verdict
from trainfast_runner.running.supervision.event_log import EventLog
from trainfast_runner.running.supervision.offload import full_disk_text
from trainfast_runner.running.supervision.ranks import LostRank
from trainfast_runner.running.supervision.stop_ladder import StopLadder
from trainfast_runner.settings.strategy_of_run import offload_folder

TAIL_LINES = 400
"""Lines at the end of the output that the verdict looks through."""
KERNEL_STATES = {
    "D": "state D (uninterruptible sleep)",
    "Z": "state Z (ended, but its tracer keeps it)",
}


@dataclass
class TrainingEnd:
    """The facts that only the supervisor sees, noted as they come; `verdict` joins them with the records."""

    unkillable_s: float
    """Seconds that a process may take to end after SIGKILL."""
    exit_code: int | None = None
    """Exit code of the direct child, negative for a signal; None until the child has ended, or if it never started."""
    spawn_error: str | None = None
    """The reason that the training did not start."""
    lost_ranks: list[LostRank] = field(default_factory=list)
    torn_down_reason: str | None = None
    """The reason that the supervisor ended the training without a request."""
    unended: list[UnkillableProcess] = field(default_factory=list)
    """Processes that outlived SIGKILL by more than `unkillable_s`."""
    no_step_reason: str | None = None
    """The reason that a user's own script has reported no step; None for a preset's run."""
    oom_kills_before: int | None = field(default_factory=oom_kills)
    """The kernel's out-of-memory kills before the training."""

    def verdict(
        self, directory: Path, run: RunFile, records: RunRecords, ladder: StopLadder, events: EventLog
    ) -> Verdict:
        """Judge the run: lost if a process cannot be ended, unless every rank had finished.

        Then the hanging process is recorded as a trouble in `events` and `records`.
        """
        facts = self._facts(directory, run, records, ladder)
        if not self.unended:
            return judge(facts)
        reason = unkillable_reason(self.unended, records, self.unkillable_s)
        # A hanging process keeps its parent from exiting with status 0: the ranks' own records count.
        verdict = judge(replace(facts, exit_code=0))
        if verdict.state != "finished":
            return lost_verdict(records, reason)
        events.record_trouble(reason)
        add_trouble(records, reason)
        return verdict

    def _facts(self, directory: Path, run: RunFile, records: RunRecords, ladder: StopLadder) -> EndFacts:
        kills_before, kills_after = self.oom_kills_before, oom_kills()
        return EndFacts(
            run=run,
            exit_code=self.exit_code,
            spawn_error=self.spawn_error,
            worker_lines=records.worker_lines,
            last_step={rank: steps[-1].step for rank, steps in records.steps.items() if steps},
            lost_ranks=tuple(lost.rank for lost in self.lost_ranks),
            oom_kills=kills_after - kills_before if kills_before is not None and kills_after is not None else 0,
            output_tail="\n".join(read_log(directory / OUTPUT_FILE, TAIL_LINES)),
            stop_ns=ladder.asked_ns,
            sigkill=ladder.killing,
            grace_s=ladder.granted_s,
            torn_down_reason=self.torn_down_reason,
            full_disk_text=full_disk_text(offload_folder(run.knobs)),
            no_step_reason=self.no_step_reason,
        )


def unkillable_reason(processes: Iterable[UnkillableProcess], records: RunRecords, waited_s: float) -> str:
    """A sentence for the run's reason or troubles: each process with its pid, state and GPU.

    A GPU driver that hangs, as after an Xid, keeps a process in the kernel.
    """
    ranks = {
        line.pid: rank
        for rank, lines in records.worker_lines.items()
        for line in lines
        if isinstance(line, StartedLine)
    }
    sentences = []
    for process in processes:
        rank = ranks.get(process.pid)
        label = process.name if rank is None else ", ".join([f"rank {rank}", *_gpu_labels(rank, records)])
        sentences.append(
            f"pid {process.pid} ({label}) is in {KERNEL_STATES.get(process.state, f'state {process.state}')}"
        )
    return f"{'; '.join(sentences)} and did not end within {waited_s:g} s of SIGKILL"


def _gpu_labels(rank: int, records: RunRecords) -> list[str]:
    """The GPUs of a rank by NVML index, by UUID where telemetry gave none; empty on a CPU."""
    run = records.run
    if run is None:
        return []
    uuids = run.device_uuids if run.world_size == 1 else run.device_uuids[rank : rank + 1]
    indexes = [
        next((sample.index for _, sample in records.device_samples.get(uuid, []) if sample.index is not None), None)
        for uuid in uuids
    ]
    return [uuid if index is None else f"GPU {index}" for uuid, index in zip(uuids, indexes, strict=True)]
