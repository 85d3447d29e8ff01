"""The processes of a training: a standby that waits for its run, and ranks, followed and ended by a ladder of signals.

`python -P -m trainfast_runner.running.supervisor --standby ORDER` waits with its training process, as its child, with
the socket of the one who keeps the standby as standard input. The fields of ORDER, in JSON: `argv` and `env` of the
training process as they would be for a run, `imports` and `questions` of the worker's standby.py, `ranks` as of
`StandbyKey`, and `output`, the file of what the process prints, which becomes the run's.
"""

from __future__ import annotations

import json
import math
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainfast_runner.machine.processes import Identity, become_subreaper, descendants, is_running, send
from trainfast_runner.machine.training_python import own_environment
from trainfast_runner.records.capped_file import OUTPUT_FILE, CappedFile, GrowingLog
from trainfast_runner.records.json_lines import Appender, Tail, open_to_append
from trainfast_runner.records.run_directory import NO_STEP, rank_file
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.records.run_lines import Event, Step
from trainfast_runner.records.worker_lines import (
    EndLine,
    ExceptionLine,
    FinishedLine,
    IgnoredStopLine,
    InvalidLine,
    PhaseLine,
    SignalLine,
    StartedLine,
    TroubleLine,
    WorkerTail,
)
from trainfast_runner.results.script_steps import no_step_reason


class StopLadder:
    """SIGTERM to the launcher, time to obey, then SIGKILL to all processes below this one. Never goes back a rung."""

    def __init__(self, grace_s: float, on_event: Callable[[Event], None]) -> None:
        self.asked_ns: int | None = None
        """Time of the first request; None without one."""
        self.granted_s = grace_s
        """Seconds between SIGTERM and SIGKILL; 0 when SIGKILL was asked for."""
        self.begun = False
        self.killing = False
        """True once SIGKILL was needed."""
        self.killed_ns: int | None = None
        """Time of the first SIGKILL."""
        self._on_event = on_event
        self._deadline_ns = 0

    def ask(self, child: Identity) -> None:
        """Note a request to end the training; a second one changes nothing."""
        if self.asked_ns is not None:
            return
        self.asked_ns = time.monotonic_ns()
        self.tear_down(child, self.granted_s)
        self._on_event(Event(t_ns=self.asked_ns, kind="stop_requested", deadline_ns=self._deadline_ns))

    def kill_now(self, child: Identity) -> None:
        """End the training at once, as a person asked."""
        now_ns = time.monotonic_ns()
        if self.asked_ns is None:
            self.asked_ns = now_ns
        self.begun, self._deadline_ns, self.granted_s = True, now_ns, 0.0
        self._on_event(Event(t_ns=now_ns, kind="stop_requested", deadline_ns=now_ns))
        self.climb(child)

    def tear_down(self, child: Identity, grace_s: float) -> None:
        """Send SIGTERM, and SIGKILL after `grace_s`, as a broken training needs without a request; once only."""
        if not self.begun:
            self.begun, self.granted_s = True, grace_s
            self._deadline_ns = time.monotonic_ns() + round(grace_s * 1e9)
            send(child, signal.SIGTERM)

    def climb(self, child: Identity) -> None:
        """Past the deadline: send SIGKILL to every process below this one, new ones included."""
        if not self.begun or time.monotonic_ns() < self._deadline_ns:
            return
        if not self.killing:
            self.killing, self.killed_ns = True, time.monotonic_ns()
            self._on_event(Event(t_ns=self.killed_ns, kind="kill_sent", pid=child.pid))
        for process in descendants(os.getpid()):
            send(process, signal.SIGKILL)


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
WAKING_SIGNALS = (*STOP_SIGNALS, signal.SIGCHLD, signal.SIGHUP)


class StopRequests:
    """Takes SIGTERM, SIGINT and SIGUSR1 as requests, wakes up for SIGCHLD, and ignores SIGHUP.

    Handlers, not SIG_IGN: an ignored signal would stay ignored in the training.
    """

    def __init__(self) -> None:
        self._requests: list[int] = []
        self._readable, self._writable = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(self._writable, warn_on_full_buffer=False)
        for signum in WAKING_SIGNALS:
            signal.signal(signum, self._note)

    def wait(self, timeout_s: float, others: Iterable[int] = ()) -> None:
        """Sleep until a signal comes, one of `others` is readable, or the time is over."""
        poll = select.poll()
        for fd in (self._readable, *others):
            poll.register(fd, select.POLLIN)
        poll.poll(timeout_s * 1000)
        with suppress(BlockingIOError):
            while os.read(self._readable, 512):
                continue

    @property
    def pending(self) -> bool:
        """True if there are requests to take."""
        return bool(self._requests)

    def take(self) -> list[int]:
        """The requests since the last call, in order."""
        requests, self._requests = self._requests, []
        return requests

    def _note(self, signum: int, _frame: object) -> None:
        if signum in STOP_SIGNALS:
            self._requests.append(signum)


STDIN, PACKET_BYTES = 0, 1 << 16
ENDS_WITHIN_S = 1.0
"""Seconds for a waiting process to end by itself once its socket is closed; it looks for that twice a second."""
IMPORTS_WITHIN_S, GOES_WITHIN_S = 120.0, 10.0
"""Chosen, not measured: seconds for a process to take its run, while it still imports and after that."""


class Standby:
    """A training process that waits for its run, alone or as the ranks of torchrun."""

    def __init__(self, order: dict[str, Any]) -> None:
        """Start the process. Raises OSError if it does not start."""
        become_subreaper()
        self._keeper = socket.socket(fileno=STDIN)
        self._variables: dict[str, str] = order["env"]
        self._ranks = max(1, order["ranks"])
        self._ready = self._gone = 0
        self._output = Path(order["output"])
        questions: int | None = order["questions"]
        self._channel, waiting = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        imports = json.dumps({"imports": order["imports"], "questions": questions})
        with waiting, os.fdopen(open_to_append(self._output), "ab") as output:
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                [*map(str, order["argv"]), "standby", imports],
                env={**own_environment(), **self._variables},
                stdin=waiting.fileno(),
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=() if questions is None else (questions,),
            )
        if questions is not None:
            os.close(questions)

    def wait(self) -> Path:
        """Return the directory of the run. Ends this process and its child where the keeper or the child is gone."""
        while True:
            readable = select.select([self._keeper, self._channel], [], [])[0]
            # The training process ends only without this socket, or by itself.
            if self._channel in readable and not self._read_channel():
                break
            if self._keeper in readable:
                packet = self._keeper.recv(PACKET_BYTES)
                if packet:
                    return Path(os.fsdecode(packet))
                break
        self.end()
        self._output.unlink(missing_ok=True)
        sys.exit()

    def give(self, run: RunFile, directory: Path, requests: StopRequests) -> str:
        """Give the run to the process; return the reason that it does not take it, else an empty text.

        A stop that is asked for meanwhile counts as taken. Raises OSError.
        """
        self._output.rename(directory / OUTPUT_FILE)
        inherited = own_environment()
        variables = {name: run.env.get(name, inherited.get(name)) for name in (*self._variables, *run.env)}
        go = json.dumps({"run": str(directory), "variables": variables, "cwd": run.cwd}).encode()
        with suppress(OSError):  # it has died
            for _ in range(self._ranks):
                self._channel.send(go)
        heard, since_s = -1, 0.0
        while self._gone < self._ranks and not requests.pending:
            if heard != self._ready + self._gone:
                heard, since_s = self._ready + self._gone, time.monotonic()
            left_s = since_s + (GOES_WITHIN_S if self._ready == self._ranks else IMPORTS_WITHIN_S) - time.monotonic()
            if left_s <= 0:
                return "the standby did not answer"
            requests.wait(left_s, [self._channel.fileno()])
            if not self._read_channel():
                return "the standby died"
        self._channel.close()
        return ""

    def end(self) -> None:
        """End the process and all below it, at once where they do not end by themselves."""
        self._channel.close()
        deadline_s = time.monotonic() + ENDS_WITHIN_S
        while self.process.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.02)
        for left in descendants(os.getpid()):
            send(left, signal.SIGKILL)
        self.process.wait()

    def _read_channel(self) -> bool:
        """Count a rank's words, if there are any; False once no rank has its end of the socket."""
        if not select.select([self._channel], [], [], 0)[0]:
            return True
        try:
            word = self._channel.recv(PACKET_BYTES)
        except OSError:
            return False
        self._ready += word == b"ready"
        self._gone += word == b"gone"
        return bool(word)


FIRST_STEPS_BYTES = 1 << 16
"""Head of `steps.jsonl` that is looked at for a first step."""


class Ranks:
    """Follows every rank of one run.

    Call `follow` often; it reads only new lines. `direct_pid` is the supervisor's own child, whose exit status the
    supervisor collects.
    """

    def __init__(
        self, directory: Path, world_size: int, direct_pid: int, on_trouble: Callable[[int, str], None], node: int = 0
    ) -> None:
        """`on_trouble(rank, sentence)` gets each failure of a rank beside its training; only the processes of the ranks
        on `node` are looked at."""
        self.in_training = False
        """True once any rank has begun to train."""
        self.ignored_stop = False
        """True once a user's own script trained on after the last step asked for."""
        self._ranks = [_FollowedRank(directory, rank, on_trouble, node) for rank in range(world_size)]
        self._direct_pid = direct_pid
        self._lost: set[int] = set()
        self._first_steps = Tail(rank_file(directory, "steps", 0), Step, window_bytes=FIRST_STEPS_BYTES)

    def follow(self) -> list[int]:
        """Read new records; return the ranks that have exited without recording their end since the last call.

        Raises OSError for an unreadable file.
        """
        # Before the records are read, so that a dead process's last lines are there.
        ended_ranks = [rank for rank in self._ranks if rank.has_ended(self._direct_pid)]
        for rank in self._ranks:
            self.in_training |= rank.follow()
            self.ignored_stop |= rank.ignored_stop
        if not self.in_training:
            self.in_training = bool(self._first_steps.new())
        lost = [rank.number for rank in ended_ranks if rank.end is None and rank.number not in self._lost]
        self._lost.update(lost)
        return lost

    @property
    def first_exception_ns(self) -> int | None:
        """Time of the first recorded failure of a rank, or None."""
        ends = (rank.end for rank in self._ranks)
        return min((end.t_ns for end in ends if isinstance(end, ExceptionLine | InvalidLine)), default=None)

    @property
    def finished_ns(self) -> int | None:
        """Time at which the last rank recorded that it had finished; None while one has not."""
        ends = [rank.end for rank in self._ranks]
        if not all(isinstance(end, FinishedLine) for end in ends):
            return None
        return max(end.t_ns for end in ends if end)


class _FollowedRank:
    """One rank: its records so far, and its process."""

    def __init__(self, directory: Path, number: int, on_trouble: Callable[[int, str], None], node: int) -> None:
        self.number, self._node = number, node
        self._on_trouble = on_trouble
        self.end: EndLine | None = None
        self._tail = WorkerTail(rank_file(directory, "worker", number))
        self._identity: Identity | None = None
        self.ignored_stop = False

    def follow(self) -> bool:
        """Read new lines; True if one of them records that training begins."""
        begins_training = False
        for line in self._tail.new():
            match line:
                case StartedLine(pid=int(pid), start_ticks=int(start_ticks)):
                    self._identity = Identity(pid, start_ticks) if line.node == self._node else None
                    self.end = None
                case FinishedLine() | ExceptionLine() | InvalidLine() | SignalLine():
                    self.end = line
                case TroubleLine():
                    self._on_trouble(self.number, line.detail or "")
                case IgnoredStopLine():
                    self.ignored_stop = True
                case PhaseLine(phase="train"):
                    begins_training = True
        return begins_training

    def has_ended(self, direct_pid: int) -> bool:
        identity = self._identity
        return identity is not None and identity.pid != direct_pid and not is_running(identity)


NO_STEP_S = 60.0
"""Time before the notice about a script without a step: it may only load, or take steps unseen."""


class ScriptWatch:
    """Follows one script, which runs below this process, and appends the steps that it prints to `steps.jsonl`.

    Where no hook can count them, a step is a line of `output.log` that a regular expression matches. A line carries no
    time: steps read at one poll share the time since the last poll that read a step. `notify` gets the sentence about a
    script that has reported no step for `no_step_s`.
    """

    def __init__(
        self,
        run: RunFile,
        directory: Path,
        output: CappedFile,
        notify: Callable[[str], None],
        no_step_s: float = NO_STEP_S,
    ) -> None:
        script = run.script
        self._run, self._directory = run, directory
        self._notify, self._no_step_s, self._notified = notify, no_step_s, False
        self._pattern = re.compile(script.steps_from_log) if script and script.steps_from_log else None
        self._warmup = script.timing_warmup if script else 0
        self._samples = script.samples_per_step if script else None
        # A progress bar redraws its line with carriage returns.
        self._log = GrowingLog(output.path, from_begin=True, separators=rb"[\r\n]", head_bytes=output.head_bytes)
        self._counted = 0
        self._last_ns = run.clock.monotonic_ns
        self._file = Appender(rank_file(directory, "steps", 0))

    def count_steps(self, *, has_ended: bool) -> None:
        """Record the steps printed since the last call; with `has_ended`, in the unfinished last line too.

        Does nothing without a pattern. Raises OSError.
        """
        pattern = self._pattern
        if pattern is None:
            return
        matches = [match for line in self._lines(has_ended) if (match := pattern.search(line)) is not None]
        if not matches:
            return
        now_ns = time.monotonic_ns()
        step_ns = (now_ns - self._last_ns) // len(matches)
        for match in matches:
            self._counted += 1
            self._last_ns += step_ns
            self._file.write(
                Step(
                    t_ns=self._last_ns,
                    step=self._counted,
                    warmup=self._counted <= self._warmup,
                    samples=self._samples,
                    loss=_loss(match),
                    step_ms=step_ns / 1e6,
                )
            )
        self._last_ns = now_ns

    def notify_without_step(self, in_training: bool) -> None:
        """Notify once that no step has come, with the ways to report steps; `in_training` is True after the first."""
        waited_s = (time.monotonic_ns() - self._run.clock.monotonic_ns) / 1e9
        if in_training or self._notified or waited_s <= self._no_step_s:
            return
        self._notified = True
        unseen = f"{NO_STEP} in {self._no_step_s:g} s: the script may still load or compile"
        self._notify(f"{unseen}; {no_step_reason(self._directory, self._run)}")

    def _lines(self, to_the_end: bool) -> Iterator[str]:
        """Yield the lines printed since the last call, oldest first: those of one look at the log, or all."""
        while (lines := self._log.read()) is not None:
            yield from lines
            if not to_the_end:
                return
        if to_the_end:
            yield self._log.unfinished()


def _loss(match: re.Match[str]) -> float | None:
    """The number in the group `loss`; None without one."""
    try:
        loss = float(match.groupdict().get("loss") or "nan")
    except ValueError:
        return None
    return loss if math.isfinite(loss) else None
