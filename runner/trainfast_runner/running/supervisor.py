"""The supervisor of one run: it starts the training, watches it, ends it when asked, and records how it ended.

`python -P -m trainfast_runner.running.supervisor RUN_DIR [REASON]` supervises the run whose `run.json` is there; REASON
is why it starts cold although a standby was kept. `--standby ORDER` waits for the run first, with its training process.
`--node N RUN_DIR` supervises node N of a run on several. The process outlives the screen.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trainfast_runner.machine import processes
from trainfast_runner.machine.resource_limits import oom_kills
from trainfast_runner.machine.training_python import own_environment
from trainfast_runner.records.capped_file import CAP_BYTES
from trainfast_runner.records.json_lines import open_to_append
from trainfast_runner.records.run_directory import RESULT_FILE, SUPERVISOR_LOG, node_file, read_run_file, shared_lock
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.records.run_lines import Event, RunStart, TrainingEnd
from trainfast_runner.running.nodes import (
    BY_SLURM,
    KILL,
    STOP,
    Nodes,
    NotPlaced,
    ask_all_nodes,
    node_argv,
    node_label,
    node_variables,
    stop_word,
)
from trainfast_runner.running.present_state import STOP_GRACE_S
from trainfast_runner.running.ranks import NO_STEP_S, Ranks, ScriptWatch, Standby, StopLadder, StopRequests
from trainfast_runner.running.record_files import CappedRecords, EventLog, TelemetryLog
from trainfast_runner.settings.spec import offload_folder
from trainfast_runner.units import counted, mebibytes
from trainfast_runner.worker.shared.host import DISK_FULL_BELOW_BYTES, delete_states, free_bytes
from trainfast_runner.worker.shared.process import PR_SET_PDEATHSIG

LOST_RANK_GRACE_S = 5.0
"""Time for a training that has lost a rank to end after SIGTERM."""
UNKILLABLE_S = 60.0
"""Time to end after SIGKILL: seconds with a large memory; a process in uninterruptible sleep may never end."""
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
"""Chosen, not measured: seconds between two looks at the training."""
ENDING_TICK_S = 0.05
"""Chosen, not measured: seconds between two looks at leftover processes that are about to end."""


_PRCTL = ctypes.CDLL(None).prctl
"""Looked up here: in a new child another thread may hold the dynamic loader's lock for ever."""


def die_with_supervisor() -> None:
    """In the child, before its program: have the kernel kill it when the thread that started it ends.

    Nobody else could end the ranks of a node whose supervisor was killed.
    """
    _PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass(frozen=True)
class SupervisorBounds:
    """The longest waits for a process, in seconds, and the largest files, in bytes."""

    grace_s: float = STOP_GRACE_S
    """Between SIGTERM and SIGKILL; for processes that the training left behind, `LEFTOVER_GRACE_S` at most."""
    unkillable_s: float = UNKILLABLE_S
    output_bytes: int = CAP_BYTES
    records_bytes: int = CAP_BYTES
    """Most bytes of a `steps*.jsonl` and of `telemetry.jsonl`."""
    no_step_s: float = NO_STEP_S
    """Before the notice about a script without a step."""


class Supervisor:
    """Supervises one run from `starting` to `result.json`; `run` calls the other methods in this order."""

    def __init__(
        self,
        directory: Path,
        run_file: RunFile,
        bounds: SupervisorBounds,
        lock_fd: int,
        standby: Standby | None = None,
        cold_reason: str = "",
        node: int = 0,
    ) -> None:
        """`lock_fd` is the descriptor of the run's lock, held by this process.

        The training is the `standby`'s process if there is one; `cold_reason` is that of `RunStart`.
        """
        self._standby, self._cold_reason = standby, cold_reason
        self._directory = directory
        self._lock_fd = lock_fd
        self._run_file = run_file
        self._requests = StopRequests()
        self._events = EventLog(directory, node)
        self._nodes = Nodes(directory, run_file, node) if run_file.nodes else None
        self._files = CappedRecords(
            directory, run_file.world_size, bounds.output_bytes, bounds.records_bytes, self._events, node
        )
        self._telemetry = TelemetryLog(
            directory,
            run_file.watch_uuids,
            self._events.append,
            self._events.record_trouble,
            on_cpu=run_file.device == "cpu",
            node=node,
        )
        self._ladder = StopLadder(bounds.grace_s, self._events.append)
        self._state = ""
        self._end = TrainingEnd(unkillable_s=bounds.unkillable_s)
        """The facts of the training's end, as far as they are known."""
        self._first_lost_ns: int | None = None
        """Time at which the first rank was seen to be lost."""
        self._node_failed_ns: int | None = None
        """Time at which another node was first seen to have ended without success."""
        self._oom_kills_before = oom_kills()
        self._script: ScriptWatch | None = None
        if run_file.script is not None:
            self._script = ScriptWatch(
                run_file,
                directory,
                self._files.output,
                lambda reason: self._events.record("no_step", detail=reason),
                bounds.no_step_s,
            )

    def run(self) -> None:
        """Supervise the run to its end; the lock must be held."""
        supervisor = processes.identify(os.getpid())
        self._events.record(
            "supervisor",
            pid=os.getpid(),
            start_ticks=supervisor.start_ticks if supervisor else None,
            node=None if self._nodes is None else self._nodes.start,
        )
        self._enter("starting")
        processes.become_subreaper()
        child = self._launch()
        if child is not None:
            self._watch(child)
            self._end_leftovers()
        self._finish()

    def _launch(self) -> processes.Identity | None:
        """Start the sampler and the training, and return its direct child; None, with the reason noted, where either
        cannot be started."""
        try:
            self._telemetry.start()
        except RuntimeError as error:  # this user may have no further thread
            self._note(spawn_error=f"cannot start the sampler: {error}")
            return None
        process = self._take_standby()
        kind = "cold" if process is None else "standby"
        try:
            process = process or self._start_cold()
        except NotPlaced as error:
            self._note(spawn_error=str(error))
            return None
        except (OSError, ValueError, IndexError) as error:
            argv = self._run_file.argv
            program = getattr(error, "filename", None) or (argv[0] if argv else "an empty command")
            reason = error.strerror if isinstance(error, OSError) else str(error)
            self._note(spawn_error=f"cannot start {os.fsdecode(program)}: {reason}")
            return None
        # Popen must never wait for the child: only `_reap_child` does, and so gets the true status.
        process.returncode = 0
        child = processes.identify(process.pid) or processes.Identity(process.pid, -1)
        start = RunStart(kind=kind, reason=self._cold_reason or None)
        self._events.record("launched", pid=child.pid, start_ticks=child.start_ticks, start=start)
        self._telemetry.follow(process.pid)
        return child

    def _take_standby(self) -> subprocess.Popen[bytes] | None:
        """Give the run to the standby and return its process; None without one, and where it does not take the run."""
        if self._standby is None:
            return None
        try:
            self._cold_reason = self._standby.give(self._run_file, self._directory, self._requests)
        except OSError as error:
            self._cold_reason = f"the standby's output cannot be moved: {error.strerror}"
        if not self._cold_reason:
            return self._standby.process
        self._standby.end()
        for pattern in ("worker*.jsonl", "steps*.jsonl"):  # of a rank that did take the run
            for path in self._directory.glob(pattern):
                path.unlink()
        return None

    def _start_cold(self) -> subprocess.Popen[bytes]:
        """Start a new process. Raises OSError, ValueError and IndexError where the command cannot be executed."""
        run, nodes = self._run_file, self._nodes
        argv = run.argv if nodes is None else node_argv(run, nodes, self._await_endpoint(nodes))
        variables = {} if nodes is None else node_variables(run, nodes)
        with os.fdopen(self._files.output.open(), "ab") as output:
            return subprocess.Popen(
                argv,
                cwd=run.cwd or None,
                # A user's own script gets the environment as it is.
                env={**(own_environment() if run.script is None else os.environ), **run.env, **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=None if nodes is None else die_with_supervisor,
            )

    def _await_endpoint(self, nodes: Nodes) -> tuple[str, int]:
        """Return where the ranks meet, once node 0 has told it. Raises NotPlaced where the run ends before."""
        while True:
            nodes.look()
            if nodes.lost:
                raise NotPlaced(next(iter(nodes.lost.values())))
            if (failed := nodes.failed_node()) is not None or nodes.stop_word or self._requests.pending:
                raise NotPlaced(nodes.reason_of(failed) or "the run ended before this node had begun")
            if (endpoint := nodes.meet()) is not None:
                return endpoint
            self._requests.wait(ENDING_TICK_S)

    def _watch(self, child: processes.Identity) -> None:
        """Follow the training until its direct child has ended, or outlived SIGKILL."""
        ranks = Ranks(
            self._directory,
            self._run_file.world_size,
            child.pid,
            lambda rank, detail: self._events.record_trouble(f"rank {rank}: {detail}"),
            node=0 if self._nodes is None else self._nodes.node,
        )
        while not self._reap_child(child):
            self._requests.wait(TICK_S)
            self._handle_signals(child)
            self._look_at_nodes(child)
            self._read_ranks(ranks)
            self._tear_down_if_broken(ranks, child)
            self._ladder.climb(child)
            self._files.trim()
            if self._ladder.killed_ns is not None and self._note_unkillable(self._ladder.killed_ns / 1e9):
                break
        self._read_ranks(ranks)

    def _reap_child(self, child: processes.Identity) -> bool:
        """Collect the direct child before any other; True if it has ended. Keeps its status."""
        pid, status = os.waitpid(child.pid, os.WNOHANG)
        if pid == 0:
            return False
        self._note(exit_code=os.waitstatus_to_exitcode(status))
        self._events.record("exited", pid=pid, exit_code=self._end.exit_code)
        return True

    def _handle_signals(self, child: processes.Identity) -> None:
        """Act on the signals that came."""
        for signum in self._requests.take():
            kills = signum == signal.SIGUSR1
            if self._nodes is not None:
                ask_all_nodes(self._directory, self._word_of(signum))
            self._stop(child, kills=kills)

    def _word_of(self, signum: int) -> str:
        """The word for the other nodes; a job gets signals of Slurm alone, because `stop` asks by the file."""
        return KILL if signum == signal.SIGUSR1 else BY_SLURM if self._run_file.by_slurm else STOP

    def _stop(self, child: processes.Identity, *, kills: bool) -> None:
        """Begin to end the training as a person asked, or kill it."""
        if kills:
            self._ladder.kill_now(child)
        else:
            self._ladder.ask(child)
        self._enter("stopping", "asked to stop")

    def _look_at_nodes(self, child: processes.Identity) -> None:
        """End this node's ranks where the run was asked to end, or another node is lost."""
        if self._nodes is None:
            return
        self._nodes.look()
        if self._nodes.stop_word == KILL and not self._ladder.killing:
            self._stop(child, kills=True)
        elif self._nodes.stop_word and not self._ladder.begun:
            self._stop(child, kills=False)
        for node, reason in self._nodes.lost.items():
            if node not in self._end.lost_nodes:
                self._note(lost_nodes={**self._end.lost_nodes, node: reason})
                self._events.record("node_lost", detail=reason)

    def _read_ranks(self, ranks: Ranks) -> None:
        """Count a script's printed steps, read the ranks' new lines, and note the ranks that were lost."""
        if self._script is not None:
            try:
                self._script.count_steps(has_ended=self._end.exit_code is not None)
            except OSError as error:
                self._events.record_trouble(f"steps.jsonl cannot be written: {error.strerror}")
        try:
            lost_ranks = ranks.follow()
        except OSError as error:
            self._events.record_trouble(f"{error.filename or 'the records'} cannot be read: {error.strerror}")
            return
        if ranks.in_training and self._state == "starting":
            self._enter("running")
        if self._ladder.begun:
            return
        for rank in lost_ranks:
            self._first_lost_ns = self._first_lost_ns or time.monotonic_ns()
            self._note(lost_ranks=(*self._end.lost_ranks, rank))
            self._events.record("rank_gone", rank=rank, detail="the process exited without reporting an error")

    def _tear_down_if_broken(self, ranks: Ranks, child: processes.Identity) -> None:
        """End a training that lost a rank, failed or finished, if it has not ended by itself in time."""
        if self._ladder.begun:
            return
        if self._script is not None:
            self._script.notify_without_step(ranks.in_training)
        reason = self._reason_to_tear_down(ranks)
        if reason is not None:
            self._note(torn_down_reason=reason)
            self._enter("stopping", reason)
            self._ladder.tear_down(child, LOST_RANK_GRACE_S)

    def _reason_to_tear_down(self, ranks: Ranks) -> str | None:
        """The reason that the training is broken; None while it is not, or may still end by itself."""
        if self._script is not None:
            # Its own launcher ends its ranks.
            return "the script caught SystemExit and trained on" if ranks.ignored_stop else None
        now_ns = time.monotonic_ns()
        if self._nodes is not None:
            if self._nodes.lost:
                return next(iter(self._nodes.lost.values()))
            if (failed := self._nodes.failed_node()) is not None:
                # torchrun's agents tell each other within a second, or wait for 300 s (more in its exit barrier).
                self._node_failed_ns = self._node_failed_ns or now_ns
                if self._nodes.reason_of(failed) or now_ns > self._node_failed_ns + REPORT_S * 1e9:
                    return f"{node_label(self._run_file, failed)} has ended"
        if self._first_lost_ns is not None and now_ns > self._first_lost_ns + REPORT_S * 1e9:
            return f"rank {self._end.lost_ranks[0]} exited without reporting an error"
        if ranks.first_exception_ns is not None and now_ns > ranks.first_exception_ns + EXCEPTION_S * 1e9:
            return "the training did not end by itself after a rank had failed"
        if ranks.finished_ns is not None and now_ns > ranks.finished_ns + TEARDOWN_S * 1e9:
            return f"every rank finished, but the processes did not end within {TEARDOWN_S:g} s"
        return None

    def _note_unkillable(self, killed_s: float) -> bool:
        """Return True, and keep the processes, if any has outlived the SIGKILL of `killed_s` for too long."""
        if time.monotonic() > killed_s + self._end.unkillable_s:
            self._note(unended=processes.unended_below(os.getpid()))
        return bool(self._end.unended)

    def _end_leftovers(self) -> None:
        """End and collect the processes that the direct child left behind."""
        deadline_s = time.monotonic() + (0 if self._ladder.killing else min(self._ladder.granted_s, LEFTOVER_GRACE_S))
        signalled: set[processes.Identity] = set()
        if self._script is not None and not self._ladder.begun:
            self._record_leftovers()
        while not self._end.unended and processes.collect_orphans():
            kill = time.monotonic() >= deadline_s
            for process in processes.descendants(os.getpid()):
                if kill or process not in signalled:
                    processes.send(process, signal.SIGKILL if kill else signal.SIGTERM)
                    signalled.add(process)
            self._requests.wait(TICK_S if kill or not signalled else ENDING_TICK_S)
            if signal.SIGUSR1 in self._requests.take() and not kill:
                deadline_s = time.monotonic()
            self._note_unkillable(deadline_s)

    def _record_leftovers(self) -> None:
        """Record the processes of a script that outlive its command, its loader workers' last moments apart."""
        deadline_s = time.monotonic() + LAST_MOMENTS_S
        while processes.collect_orphans() and time.monotonic() < deadline_s:
            self._requests.wait(ENDING_TICK_S)
        if leftovers := processes.descendants(os.getpid()):
            count = counted(len(leftovers), "process", "processes")
            self._events.record_trouble(
                f"the command ended before {count} that it had started: ended by the supervisor"
            )

    def _finish(self) -> None:
        """Record the facts of the end, have the run settled by a process of its own, and remove offloaded files."""
        self._telemetry.stop()
        self._files.compact()
        if self._nodes is not None and self._end.exit_code and not self._end.unended:
            self._note(spawn_error=self._nodes.port_taken())
        kills_before, kills_after = self._oom_kills_before, oom_kills()
        self._note(
            oom_kills=kills_after - kills_before if kills_before is not None and kills_after is not None else 0,
            stop_ns=self._ladder.asked_ns,
            sigkill=self._ladder.killing,
            grace_s=self._ladder.granted_s,
            full_disk_text=full_disk_text(offload_folder(self._run_file.knobs)),
        )
        ended = Event(t_ns=time.monotonic_ns(), kind="ended", end=self._end)
        self._events.append(ended)
        if self._nodes is not None and not self._is_to_settle(self._nodes):
            delete_states(offload_folder(self._run_file.knobs), self._directory)
            return
        settling = self._start_settling(ended)
        # Meanwhile: the offloaded states may be on the same full disk, and gigabytes take time.
        delete_states(offload_folder(self._run_file.knobs), self._directory)
        while settling is not None and settling.poll() is None:
            if self._nodes is not None:
                self._nodes.look()  # without a beat the next node would write the result too
            self._requests.wait(ENDING_TICK_S)

    def _is_to_settle(self, nodes: Nodes) -> bool:
        """Wait until the other nodes have ended; True if this one writes the result, False once another has.

        Of a job that Slurm ends only the next reader learns the reason, once the job is gone: it writes the result.
        """
        while not (self._directory / RESULT_FILE).exists():
            nodes.look()
            if nodes.have_ended() and stop_word(self._directory) == BY_SLURM:
                return False
            if nodes.have_ended() and nodes.settles():
                return True
            self._requests.wait(TICK_S)
            for signum in self._requests.take():
                ask_all_nodes(self._directory, self._word_of(signum))
        return False

    def _start_settling(self, ended: Event) -> subprocess.Popen[bytes] | None:
        """Start the process that writes `result.json`; None where this user may have no further process.

        It holds the run's lock too. Where it fails, the run's next reader settles the run by the same records.
        """
        try:
            event = msgspec.json.encode(ended)
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "trainfast_runner.running.settling", str(self._directory), event],
                stdin=subprocess.DEVNULL,
                pass_fds=[self._lock_fd],
            )
        except OSError as error:
            self._events.record_trouble(f"the result cannot be computed by a process of its own: {error.strerror}")
            return None

    def _note(self, **facts: object) -> None:
        """Note facts of the end."""
        self._end = msgspec.structs.replace(self._end, **facts)

    def _enter(self, state: str, reason: str | None = None) -> None:
        """Record a change of state, once."""
        if state != self._state:
            self._state = state
            self._events.record("state", state=state, reason=reason)


def supervise(
    directory: Path, bounds: SupervisorBounds, standby: Standby | None = None, cold_reason: str = "", node: int = 0
) -> None:
    """Supervise the run in `directory` to its end. Exits with a line on stderr if there is no run to start."""
    run = read_run_file(directory)
    if run is None:
        sys.exit(f"{directory} has no readable run.json")
    with shared_lock(directory) as lock_fd:
        if (directory / RESULT_FILE).exists():
            # The launcher died before this process had the lock, and a reader wrote the result of a lost run.
            sys.exit(f"{directory} has ended already")
        Supervisor(directory, run, bounds, lock_fd, standby, cold_reason, node).run()


DISK_ANSWERS_S = 5.0
"""Time for `offload_path` to answer with its free space."""


def full_disk_text(path: Path | None) -> str | None:
    """The path with its free space if its disk is full; None otherwise."""
    if path is None:
        return None
    free_readings: list[int] = []

    def read_free() -> None:
        with suppress(OSError):
            free_readings.append(free_bytes(path))

    # A dead NFS server never answers, and the verdict does not wait for it.
    reading = threading.Thread(target=read_free, daemon=True)
    reading.start()
    reading.join(DISK_ANSWERS_S)
    is_full = bool(free_readings) and free_readings[0] < DISK_FULL_BELOW_BYTES
    return f"offload_path={path} is full ({mebibytes(free_readings[0])} free)" if is_full else None


def stand_by(order: str) -> None:
    """Wait for a run with its training process, then supervise it; end with the one who keeps the standby."""
    standby = Standby(json.loads(order))
    directory = standby.wait()
    _write_to(directory / SUPERVISOR_LOG)
    supervise(directory, SupervisorBounds(), standby)


def _write_to(log_file: Path) -> None:
    """Let this process read nothing, and write what it prints to its log."""
    with open(os.devnull, "rb") as nothing, os.fdopen(open_to_append(log_file), "ab") as log:
        for file, descriptor in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(file.fileno(), descriptor)


def supervise_node(directory: Path, number: str) -> None:
    """Supervise a node of a run on several, away from the connection that started it.

    With `slurm` for a number Slurm has started this process on each node, and ends the node's ranks with it.
    """
    if number == "slurm":
        supervise(directory, SupervisorBounds(), node=int(os.environ["SLURM_NODEID"]))
        return
    if os.fork():
        os._exit(0)
    os.setsid()
    _write_to(node_file(directory, SUPERVISOR_LOG, int(number)))
    supervise(directory, SupervisorBounds(), node=int(number))


if __name__ == "__main__":
    if sys.argv[1] == "--standby":
        stand_by(sys.argv[2])
    elif sys.argv[1] == "--node":
        supervise_node(Path(sys.argv[3]).resolve(), sys.argv[2])
    else:
        supervise(Path(sys.argv[1]).resolve(), SupervisorBounds(), cold_reason="".join(sys.argv[2:]))
