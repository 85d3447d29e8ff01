"""The supervisor of one run: it starts the training, watches it, ends it when asked, and records how it ended.

`python -P -m trainfast_runner.running.supervisor RUN_DIR` with a `run.json` in it; it outlives the screen.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainfast_runner.machine.cgroup import oom_kills
from trainfast_runner.machine.processes.family import UnkillableProcess, descendants, unended
from trainfast_runner.machine.processes.identity import Identity, become_subreaper, identify, send
from trainfast_runner.machine.worker_scripts import own_environment
from trainfast_runner.memory import corrections
from trainfast_runner.memory.predicted_run import with_prediction
from trainfast_runner.records.capped_file import CAP_BYTES, CappedFile
from trainfast_runner.records.file_locks import shared_lock
from trainfast_runner.records.output_log import OUTPUT_FILE, read_log
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_directory import RESULT_FILE, read_run_file
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.records.run_records import RunRecords, rank_file
from trainfast_runner.records.step_lines import capped_step_file
from trainfast_runner.results.ended_result import (
    add_trouble,
    read_records_or_note_trouble,
    result_with_figures,
    write_provisional_result,
    write_result,
)
from trainfast_runner.results.verdict import Evidence, Verdict, judge
from trainfast_runner.running.ending import Signals, StopLadder, collect_orphans, did_not_end
from trainfast_runner.running.event_log import EventLog
from trainfast_runner.running.offload import full_disk, offload_path, remove_offloaded
from trainfast_runner.running.ranks import LostRank, Ranks
from trainfast_runner.running.recovery import lost_verdict
from trainfast_runner.running.scripts.sandbox import remove_sandbox
from trainfast_runner.running.scripts.script_watch import NO_STEP_S, ScriptWatch
from trainfast_runner.running.stopping import STOP_GRACE_S
from trainfast_runner.running.telemetry_log import TelemetryLog

LOST_RANK_GRACE_S = 5.0
"""Time for a training that has lost a rank to end after SIGTERM."""
UNKILLABLE_S = 60.0
"""Time to end after SIGKILL: seconds with a large memory, for ever in uninterruptible sleep."""
LEFTOVER_GRACE_S = 5.0
"""Time for processes that the training left behind to end after SIGTERM; less if grace_s is less."""
LAST_MOMENTS_S = 1.0
"""Time for a script's helpers to end by themselves after it."""
REPORT_S = 4.0
"""The launcher's time to see a lost rank itself and print which one it was: a second, and more where others train."""
EXCEPTION_S = 3.0
"""Time between a rank's exception and the end of the training, before the rest is torn down."""
TEARDOWN_S = 60.0
"""Time between the last rank's record that it finished and the end of the training."""
TICK_S = 0.25
TAIL_LINES = 400
RESULT_RETRIES = 40


@dataclass(frozen=True)
class SupervisorBounds:
    """The longest waits for a process, in seconds, and the largest files, in bytes."""

    grace_s: float = STOP_GRACE_S
    """Between SIGTERM and SIGKILL; for processes that the training left behind, `LEFTOVER_GRACE_S` at most."""
    unkillable_s: float = UNKILLABLE_S
    output_bytes: int = CAP_BYTES
    steps_bytes: int = CAP_BYTES
    """Most bytes of a `steps*.jsonl`."""
    no_step_s: float = NO_STEP_S
    """Before the notice about a script without a step."""


class Supervisor:
    """Supervises one run from `starting` to `result.json`; `run` calls the other methods in this order."""

    def __init__(self, directory: Path, run: RunFile, bounds: SupervisorBounds) -> None:
        self.directory = directory
        self.run_file = run
        self._signals = Signals()
        self._events = EventLog(directory)
        self._output = CappedFile(directory / OUTPUT_FILE, bounds.output_bytes)
        self._steps = [
            capped_step_file(rank_file(directory, "steps", n), bounds.steps_bytes) for n in range(run.world_size)
        ]
        self._telemetry = TelemetryLog(
            directory, run.watch_uuids, self._events.append, self._events.record_trouble, on_cpu=run.device == "cpu"
        )
        self._ladder = StopLadder(bounds.grace_s, self._events.append)
        self._state = ""
        self._child: Identity | None = None
        self._exit_code: int | None = None
        self._spawn_error: str | None = None
        self._lost_ranks: list[LostRank] = []
        self._unkillable_s = bounds.unkillable_s
        self._unended: list[UnkillableProcess] = []
        self._torn_down: str | None = None
        self._oom_kills_before = oom_kills()
        self._offload_path = offload_path(run)
        self._script: ScriptWatch | None = None
        if run.script is not None:
            self._script = ScriptWatch(run, directory, self._output.path, self._record_no_step, bounds.no_step_s)

    def run(self) -> None:
        """Supervise the run to its end; the lock must be held."""
        supervisor = identify(os.getpid())
        self._events.record("supervisor", pid=os.getpid(), start_ticks=supervisor.start_ticks if supervisor else None)
        self._enter("starting")
        become_subreaper()
        self._telemetry.start()
        self._launch()
        if self._child is not None:
            self._watch(self._child)
            self._end_leftovers()
        self._finish()

    def _launch(self) -> None:
        """Start the training; a command that cannot be executed becomes the reason of the run's end."""
        run = self.run_file
        try:
            output = self._output.open()
            try:
                process = subprocess.Popen(
                    run.argv,
                    cwd=run.cwd or None,
                    # A user's own script gets the environment as it is.
                    env={**(own_environment() if run.script is None else os.environ), **run.env},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            finally:
                os.close(output)
        except (OSError, ValueError, IndexError) as error:
            what = getattr(error, "filename", None) or (run.argv[0] if run.argv else "an empty command")
            why = error.strerror if isinstance(error, OSError) else str(error)
            self._spawn_error = f"cannot start {os.fsdecode(what)}: {why}"
            return
        # Popen must never wait for it: only `_reap_child` does, and so gets the true status.
        process.returncode = 0
        self._child = identify(process.pid) or Identity(process.pid, -1)
        self._events.record("launched", pid=self._child.pid, start_ticks=self._child.start_ticks)
        self._telemetry.follow(process.pid)

    def _watch(self, child: Identity) -> None:
        """Follow the training until its direct child has ended, or outlived SIGKILL."""
        ranks = Ranks(self.directory, self.run_file.world_size, child.pid, self._record_rank_trouble)
        try:
            while not self._reap_child(child):
                self._signals.wait(TICK_S, ranks.watched_fds())
                self._handle_signals(child)
                self._read_ranks(ranks)
                self._tear_down_if_broken(ranks, child)
                self._ladder.climb(child)
                self._enforce_caps()
                if self._ladder.killed_ns is not None and self._note_unkillable(self._ladder.killed_ns / 1e9):
                    break
            self._read_ranks(ranks)
        finally:
            ranks.close()

    def _reap_child(self, child: Identity) -> bool:
        """Collect the direct child before any other; True if it has ended. Keeps its status."""
        pid, status = os.waitpid(child.pid, os.WNOHANG)
        if pid == 0:
            return False
        self._exit_code = os.waitstatus_to_exitcode(status)
        self._events.record("exited", pid=pid, exit_code=self._exit_code)
        return True

    def _handle_signals(self, child: Identity) -> None:
        """Act on the signals that came."""
        for signum in self._signals.take():
            if signum == signal.SIGUSR1:
                self._ladder.kill_now(child)
            else:
                self._ladder.ask(child)
            self._enter("stopping", "asked to stop")

    def _read_ranks(self, ranks: Ranks) -> None:
        """Read the ranks' new lines, and note which ranks are gone."""
        try:
            if self._script is not None:
                self._script.count_steps(has_ended=self._exit_code is not None)
            gone = ranks.follow()
        except OSError as error:
            self._events.record_trouble(f"{error.filename or 'the records'} cannot be read: {error.strerror}")
            return
        if ranks.in_training and self._state == "starting":
            self._enter("running")
        if self._ladder.begun:
            return
        for lost in gone:
            self._lost_ranks.append(lost)
            self._events.record("rank_gone", rank=lost.rank, detail="the process exited without reporting an error")

    def _tear_down_if_broken(self, ranks: Ranks, child: Identity) -> None:
        """End a training that lost a rank, failed or finished, if it has not ended by itself in time."""
        if self._ladder.begun:
            return
        now = time.monotonic_ns()
        failed_ns, finished_ns = ranks.first_exception_ns, ranks.finished_ns
        if self._script is not None:
            # Its own launcher ends its ranks.
            self._script.look(ranks.in_training)
            self._torn_down = "the script caught SystemExit and trained on" if ranks.ignored_stop else None
        elif self._lost_ranks and now > self._lost_ranks[0].t_ns + REPORT_S * 1e9:
            self._torn_down = f"rank {self._lost_ranks[0].rank} exited without reporting an error"
        elif failed_ns is not None and now > failed_ns + EXCEPTION_S * 1e9:
            self._torn_down = "the training did not end by itself after a rank had failed"
        elif finished_ns is not None and now > finished_ns + TEARDOWN_S * 1e9:
            self._torn_down = f"every rank finished, but the processes did not end within {TEARDOWN_S:g} s"
        if self._torn_down is not None:
            self._enter("stopping", self._torn_down)
            self._ladder.tear_down(child, LOST_RANK_GRACE_S)

    def _note_unkillable(self, killed_s: float) -> bool:
        """Return True, and keep the processes, if any has outlived the SIGKILL of `killed_s` for too long."""
        if time.monotonic() > killed_s + self._unkillable_s:
            self._unended = unended(os.getpid())
        return bool(self._unended)

    def _end_leftovers(self) -> None:
        """End and collect the processes that the direct child left behind."""
        deadline = time.monotonic() + (0 if self._ladder.killing else min(self._ladder.granted_s, LEFTOVER_GRACE_S))
        signalled: set[Identity] = set()
        if self._script is not None and not self._ladder.begun:
            self._record_leftovers()
        while not self._unended and collect_orphans():
            kill = time.monotonic() >= deadline
            for process in descendants(os.getpid()):
                if kill or process not in signalled:
                    send(process, signal.SIGKILL if kill else signal.SIGTERM)
                    signalled.add(process)
            self._signals.wait(TICK_S if kill or not signalled else 0.05)
            if signal.SIGUSR1 in self._signals.take() and not kill:
                deadline = time.monotonic()
            self._note_unkillable(deadline)

    def _record_leftovers(self) -> None:
        """Record the processes of a script that outlive its command, its loader workers' last moments apart."""
        deadline = time.monotonic() + LAST_MOMENTS_S
        while collect_orphans() and time.monotonic() < deadline:
            self._signals.wait(0.05)
        if leftovers := descendants(os.getpid()):
            count = "1 process" if len(leftovers) == 1 else f"{len(leftovers)} processes"
            self._events.record_trouble(
                f"the command ended before {count} that it had started: ended by the supervisor"
            )

    def _finish(self) -> None:
        """The verdict, the summary, `result.json`."""
        ended_ns = time.monotonic_ns()
        self._telemetry.stop()
        for file in (self._output, *self._steps):
            try:
                file.compact()
            except OSError as error:
                self._events.record_trouble(f"{file.path.name} cannot be compacted: {error.strerror}")
        records = read_records_or_note_trouble(self.directory)
        verdict = self._verdict(records)
        self._enter(verdict.state, verdict.reason)
        with suppress(OSError):  # the result itself is tried for longer
            write_provisional_result(self.directory, records, verdict, ended_ns)
        result = result_with_figures(self.directory, records, verdict, ended_ns)
        with suppress(Exception):  # the next prediction is then as good as the last
            # Before result.json: the app predicts the next run as soon as it appears.
            corrections.learn(self.directory.parent.parent, with_prediction(records), result)
        # Before result.json: a run without one is settled by its next reader, which removes these files too.
        remove_sandbox(self.directory)
        if not self._try_write_result(result):
            # The offloaded states may be on the same disk.
            self._remove_offloaded()
            for _ in range(RESULT_RETRIES):
                # A full disk may have space again in a moment; else a reader judges the run by its records.
                if self._try_write_result(result):
                    break
                self._signals.wait(TICK_S)
        # After the result: another process may lock the user's directory, and gigabytes take time.
        self._remove_offloaded()

    def _try_write_result(self, result: Result) -> bool:
        """Write `result.json`; False when the disk does not take it."""
        try:
            write_result(self.directory, result)
        except OSError as error:
            self._events.record_trouble(f"{RESULT_FILE} cannot be written: {error.strerror}")
            return False
        return True

    def _verdict(self, records: RunRecords) -> Verdict:
        """The verdict: lost if a process cannot be ended, unless every rank had finished before."""
        if not self._unended:
            return self._judge(records, self._exit_code)
        reason = did_not_end(self._unended, records, self._unkillable_s)
        # A hanging process keeps its parent from exiting with status 0: the ranks' own records count.
        verdict = self._judge(records, 0)
        if verdict.state != "finished":
            return lost_verdict(records, reason)
        self._events.record_trouble(reason)
        add_trouble(records, reason)
        return verdict

    def _judge(self, records: RunRecords, exit_code: int | None) -> Verdict:
        before, after = self._oom_kills_before, oom_kills()
        return judge(
            Evidence(
                run=self.run_file,
                exit_code=exit_code,
                spawn_error=self._spawn_error,
                worker=records.worker,
                last_step={rank: steps[-1].step for rank, steps in records.steps.items() if steps},
                gone=tuple(lost.rank for lost in self._lost_ranks),
                oom_kills=after - before if before is not None and after is not None else 0,
                output_tail="\n".join(read_log(self._output.path, TAIL_LINES)),
                stop_ns=self._ladder.asked_ns,
                sigkill=self._ladder.killing,
                grace_s=self._ladder.granted_s,
                torn_down=self._torn_down,
                full_disk=full_disk(self._offload_path),
                no_step=None if self._script is None else self._script.why_no_step(),
            )
        )

    def _remove_offloaded(self) -> None:
        trouble = remove_offloaded(self._offload_path)
        if trouble is not None:
            self._events.record_trouble(trouble)

    def _enforce_caps(self) -> None:
        """Hold the output and the step records under their caps."""
        self._trim_file(self._output, "output_trimmed")
        for file in self._steps:
            if file.path.exists():  # else that rank has taken no step yet
                self._trim_file(file, "steps_trimmed")

    def _trim_file(self, file: CappedFile, kind: str) -> None:
        truncated_before = file.truncated
        try:
            dropped = file.trim()
        except OSError as error:
            self._events.record_trouble(f"{file.path.name} cannot be trimmed: {error.strerror}")
            return
        if dropped and file.truncated and not truncated_before:
            self._events.record(kind, detail="truncated: this file system cannot punch holes")
        elif dropped and file.dropped_bytes == dropped:
            self._events.record(kind, detail=f"over {file.cap_bytes} bytes: the middle is dropped")

    def _enter(self, state: str, reason: str | None = None) -> None:
        """Record a change of state, once."""
        if state != self._state:
            self._state = state
            self._events.record("state", state=state, reason=reason)

    def _record_no_step(self, why: str) -> None:
        self._events.record("no_step", detail=why)

    def _record_rank_trouble(self, rank: int, what: str) -> None:
        self._events.record_trouble(f"rank {rank}: {what}")


def supervise(directory: Path, bounds: SupervisorBounds) -> None:
    """Supervise the run in `directory` to its end. Exits with a line on stderr if there is no run to start."""
    run = read_run_file(directory)
    if run is None:
        sys.exit(f"{directory} has no readable run.json")
    with shared_lock(directory):
        if (directory / RESULT_FILE).exists():
            # The launcher died before this process had the lock, and a reader wrote the result of a lost run.
            sys.exit(f"{directory} has ended already")
        Supervisor(directory, run, bounds).run()


def main() -> None:
    """Supervise the run in the directory named on the command line."""
    parser = argparse.ArgumentParser(prog="trainfast_runner.running.supervisor", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    supervise(parser.parse_args().run_dir.resolve(), SupervisorBounds())


if __name__ == "__main__":
    main()
