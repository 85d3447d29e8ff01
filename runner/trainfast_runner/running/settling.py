"""Settle an ended run: judge its end by its records, compute its figures, and write `result.json`.

`python -P -m trainfast_runner.running.settling RUN_DIR EVENT` does so for the supervisor, in a process of its own, so
that no analysis can take the supervisor down or swell it; EVENT is the one of kind `ended`, for a full disk takes none.
A run that was left without a result is settled by its next reader. A bug in the analysis costs the figures only.
Another process stops a run by its supervisor, or without one ends the run's processes by the same ladder.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.machine.processes import Identity, descendants, is_running, send
from trainfast_runner.memory.corrections import record_correction
from trainfast_runner.memory.headroom import with_prediction
from trainfast_runner.records import run_directory
from trainfast_runner.records.capped_file import OUTPUT_FILE, read_log
from trainfast_runner.records.home import Home
from trainfast_runner.records.json_lines import Appender, write_atomically
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_lines import Event, TrainingEnd
from trainfast_runner.records.worker_lines import ExceptionLine, FinishedLine, InvalidLine, StartedLine, error_of
from trainfast_runner.results.script_steps import no_step_reason
from trainfast_runner.results.summary import summarise, without_figures
from trainfast_runner.results.verdict import EndFacts, Verdict, judge, one_line
from trainfast_runner.running import present_state
from trainfast_runner.running.nodes import BY_SLURM, KILL, STOP, ask_all_nodes, end_of_nodes, stop_word
from trainfast_runner.running.slurm import cancel, end_reason, job_of, job_state
from trainfast_runner.settings.spec import offload_folder
from trainfast_runner.units import counted
from trainfast_runner.worker.shared.host import ALIVE_LOCK_FILE, delete_states

NO_FIGURES = "the figures of this run could not be computed"
TAIL_LINES = 400
"""Lines at the end of the output that the verdict looks through."""
KERNEL_STATES = {"D": "state D (uninterruptible sleep)", "Z": "state Z (ended, but its tracer keeps it)"}


def settle(directory: Path, ended: Event | None = None, on_verdict: Callable[[Verdict], None] | None = None) -> Result:
    """Return the result of an ended run, computed from its records. Removes a trial's sandbox; writes no result.

    `ended` is the event of that kind, by default read from the records. `on_verdict` gets the verdict before the
    analysis begins. Nothing of the run may write any more.
    """
    records = _read_records_or_note_trouble(directory)
    ended = ended or next((event for event in reversed(records.events) if event.kind == "ended"), None)
    if records.run is not None and records.run.nodes:
        ended = end_of_nodes(directory, records.run, ended)
    if ended is None or ended.end is None:
        verdict, ended_ns = _lost_verdict(records, present_state.LEFT_BEHIND), records.last_t_ns()
    else:
        verdict, ended_ns = _verdict(directory, records, ended.end), ended.t_ns
    verdict = _by_slurm(directory, verdict)
    if on_verdict is not None:
        on_verdict(verdict)
    try:
        records = with_prediction(records)
        result = summarise(directory, records, verdict, ended_ns)
    except Exception as error:
        result = without_figures(directory, records, verdict, ended_ns)
        result = msgspec.structs.replace(result, troubles=[*result.troubles, _failure(NO_FIGURES, error)])
    with suppress(Exception):  # the next prediction is then as good as the last
        record_correction(Home.of_run(directory).path, records, result)
    shutil.rmtree(directory / run_directory.SANDBOX_FOLDER, ignore_errors=True)
    return result


def _by_slurm(directory: Path, verdict: Verdict) -> Verdict:
    """The verdict on a run that Slurm ended, which is stopped, with Slurm's reason; any other as it is."""
    if verdict.state not in ("stopped", "killed", "lost") or (job := job_of(directory)) is None:
        return verdict
    reason = end_reason(job_state(job))
    if reason is None and stop_word(directory) == BY_SLURM:
        reason = "Slurm ended it"
    return verdict if reason is None else Verdict("stopped", f"{reason}; {verdict.reason}")


def _read_records_or_note_trouble(directory: Path) -> run_directory.RunRecords:
    """The records of a run; if reading them fails, the ranks' and the supervisor's lines alone, and a trouble."""
    try:
        return run_directory.read_records(directory)
    except Exception as error:
        records = run_directory.RunRecords(run=run_directory.read_run_file(directory))
        with suppress(Exception):
            records.events = run_directory.read_events(directory, records)
            records.worker_lines = run_directory.read_worker_lines(directory, records)
        _add_trouble(records, _failure("the records of this run could not be read", error))
        return records


def _add_trouble(records: run_directory.RunRecords, sentence: str) -> None:
    """Add a trouble that is not on the disk, for the result to name."""
    records.events.append(Event(t_ns=time.monotonic_ns(), kind="trouble", detail=sentence))


def _verdict(directory: Path, records: run_directory.RunRecords, end: TrainingEnd) -> Verdict:
    """Judge the run: lost if a process cannot be ended, unless every rank had finished.

    Then the hanging process is recorded as a trouble in `records`.
    """
    run = records.run
    facts = EndFacts(
        run=run,
        # A hanging process keeps its parent from exiting with status 0: the ranks' own records count.
        end=msgspec.structs.replace(end, exit_code=0) if end.unended else end,
        worker_lines=records.worker_lines,
        last_step={rank: steps[-1].step for rank, steps in records.steps.items() if steps},
        output_tail="\n".join(read_log(directory / OUTPUT_FILE, TAIL_LINES)),
        no_step_reason=no_step_reason(directory, run) if run is not None and run.script is not None else None,
    )
    verdict = judge(facts)
    if not end.unended:
        return verdict
    reason = unended_reason(end, records)
    if verdict.state != "finished":
        return _lost_verdict(records, reason)
    _add_trouble(records, reason)
    return verdict


def unended_reason(end: TrainingEnd, records: run_directory.RunRecords) -> str:
    """A sentence for the run's reason or troubles: each unended process with its pid and state.

    A GPU driver that hangs, as after an Xid, keeps a process in the kernel.
    """
    ranks = {
        line.pid: rank
        for rank, lines in records.worker_lines.items()
        for line in lines
        if isinstance(line, StartedLine)
    }
    sentences = []
    for process in end.unended:
        rank = ranks.get(process.pid)
        label = process.name if rank is None else f"rank {rank}"
        state = KERNEL_STATES.get(process.state, f"state {process.state}")
        sentences.append(f"pid {process.pid} ({label}) is in {state}")
    return f"{'; '.join(sentences)} and did not end within {end.unkillable_s:g} s of SIGKILL"


def _failure(subject: str, error: Exception) -> str:
    """The error, with the file and line that raised it, in one line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{subject}: {message} ({Path(frame.filename).name}, line {frame.lineno})"


def recover_result(directory: Path) -> Result | None:
    """The result of a run that has ended, written now from its records when its supervisor could not.

    None while anything of it is alive, where a file is unreadable, on another machine than the run's, and where a newer
    version wrote the result in a way that this one cannot read. In a home that cannot be written the result is given
    all the same.
    """
    result = run_directory.read_result(directory)
    run = run_directory.read_run_file(directory)
    if result is not None or run is None or run_directory.unreadable_reason(directory) is not None:
        return result
    if present_state.other_host(run) is not None:
        job = job_of(directory) if run.by_slurm else None
        if job is None or job_state(job).stage != "gone":
            return result
    with run_directory.exclusive_lock(directory / ALIVE_LOCK_FILE, create=False) as is_ours:
        if not is_ours:
            return run_directory.read_result(directory)
        # The last holder of the lock may have written the result.
        result = run_directory.read_result(directory)
        if result is not None or present_state.is_result_newer(directory):
            return result
        result = settle(directory)
        with suppress(OSError):  # A full or read-only disk: the next reader tries again.
            _write_result(directory, result)
        delete_states(offload_folder(run.knobs), directory)
        return result


def remove_run(home: Home, run_id: str) -> None:
    """Delete a run's directory and the states that it has offloaded. Raises UserError while it is alive."""
    directory = home.directory(run_id)
    run = run_directory.read_run_file(directory)
    home.remove(run_id)
    if run is not None and present_state.other_host(run) is None:
        delete_states(offload_folder(run.knobs), directory)


def _lost_verdict(records: run_directory.RunRecords, reason: str) -> Verdict:
    """The verdict on a run whose supervisor did not see its end: `reason`, and the end that its records show."""
    steps = max((steps_of_rank[-1].step for steps_of_rank in records.steps.values() if steps_of_rank), default=0)
    parts = [f"{counted(steps, 'step')} recorded"]
    world_size = records.run.world_size if records.run else 1
    ends = {
        rank: line
        for rank, lines in records.worker_lines.items()
        for line in lines
        if isinstance(line, FinishedLine | ExceptionLine | InvalidLine)
    }
    first_failure = next(((rank, line) for rank, line in ends.items() if not isinstance(line, FinishedLine)), None)
    error = None
    if first_failure is not None:
        rank, line = first_failure
        error = error_of(line, rank)
        parts.append(f"rank {rank} had recorded {error.type}: {one_line(error.message or '')}")
    elif len(ends) >= world_size:
        parts.append("every rank had recorded that it finished")
    else:
        parts.append("no end was recorded")
    return Verdict("lost", f"{reason}: {'; '.join(parts)}", error)


def result_or_none_while_live(directory: Path) -> Result | None:
    """Return the result, or None while the run is alive; raises UserError for a directory without records."""
    result = recover_result(directory)
    if result is None and (state := present_state.run_state(directory)).ended:
        is_unreadable = state.state == "unreadable"
        if not is_unreadable and run_directory.is_alive(directory):
            return None  # its supervisor is about to write the result
        # It may have ended between the two looks.
        result = recover_result(directory)
        if result is None:
            raise UserError(
                f"{directory.name} has no result: {state.reason}",
                key=directory.name,
                exit_code=run_directory.EXIT_CODES["unreadable" if is_unreadable else "lost"],
            )
    return result


def final_result(home: Home, run_id: str, command: str = "compare") -> Result:
    """Return the result of an ended run.

    Raises UserError while the run is alive, advising to repeat `command` after its end.
    """
    result = result_or_none_while_live(home.directory(run_id))
    if result is None:
        raise UserError(
            f"{run_id} is still running: its figures are not final",
            key=run_id,
            advice=f"trainfast-tui attach {run_id}, then {command}",
        )
    return result


KILL_POLL_S = 0.1
"""Chosen, not measured: seconds between two looks at the processes of a run without a supervisor."""
KILLED_WITHIN_S = 10.0
"""Time for killed processes to end before `stop_unsupervised` gives up."""


def request_stop(directory: Path) -> bool:
    """Ask the run to end: its supervisor begins the stop ladder; asking again changes nothing.

    False when the run goes on without a supervisor: `stop_unsupervised` ends it. Raises UserError when it has ended.
    """
    return _signal_supervisor(directory, signal.SIGTERM)


def kill_now(directory: Path) -> bool:
    """Have the supervisor send SIGKILL to every process of the run. Returns and raises as `request_stop`."""
    return _signal_supervisor(directory, signal.SIGUSR1)


def stop_unsupervised(
    directory: Path, grace_s: float, on_tick: Callable[[float], None] = lambda remaining_s: None
) -> Result | None:
    """Stop a run without a supervisor and return its result (`lost`) once all its processes have ended.

    `on_tick` gets the seconds left until SIGKILL, about ten times a second. None when processes remain that this
    user cannot end. Raises UserError when the run has ended, or when it has a supervisor.
    """
    _refuse_ended(directory)
    if present_state.process_of(directory, "supervisor") is not None:
        name = directory.name
        raise UserError(f"{name} has a supervisor: stop it with `trainfast-tui stop {name}`", key=name)
    launched_child = present_state.process_of(directory, "launched")
    ranks = present_state.running_ranks(directory)
    asked_first = [launched_child] if launched_child is not None else ranks
    asked_first = [*asked_first, *present_state.forks_left_by(directory)]
    processes = _with_descendants({*asked_first, *ranks})
    for process in asked_first:
        send(process, signal.SIGTERM)
    deadline_s = time.monotonic() + grace_s
    while any(map(is_running, processes)) and (left_s := deadline_s - time.monotonic()) > 0:
        on_tick(left_s)
        time.sleep(min(KILL_POLL_S, left_s))
        processes = _with_descendants(processes)
    give_up_s = time.monotonic() + KILLED_WITHIN_S
    while (any(map(is_running, processes)) or run_directory.is_alive(directory)) and time.monotonic() < give_up_s:
        for process in processes:
            send(process, signal.SIGKILL)
        on_tick(0.0)
        time.sleep(KILL_POLL_S)
        processes = _with_descendants(processes)
    return recover_result(directory)


def _with_descendants(processes: set[Identity]) -> set[Identity]:
    """The processes with their present descendants; an orphan has no ancestor left, so it must be known before."""
    return processes | {child for process in processes if is_running(process) for child in descendants(process.pid)}


def _signal_supervisor(directory: Path, signum: int) -> bool:
    run = run_directory.read_run_file(directory)
    if run is not None and run.has_named_nodes and not (directory / run_directory.RESULT_FILE).exists():
        ask_all_nodes(directory, KILL if signum == signal.SIGUSR1 else STOP)
        if (job := job_of(directory)) is not None and job_state(job).stage == "pending":
            cancel(job)
        if present_state.other_host(run) is not None:
            return True
    present_state.refuse_left_alone(directory)
    supervisor = present_state.process_of(directory, "supervisor")
    if supervisor is not None and send(supervisor, signum):
        return True
    _refuse_ended(directory)
    return False


def _refuse_ended(directory: Path) -> None:
    state = present_state.run_state(directory)
    if state.ended:
        raise UserError(f"{directory.name} is not running: it is {state.state}", key=directory.name)


RESULT_TRIES = 40
"""Tries to write the result: 10 s on a full disk, which may have space again in a moment."""
PAUSE_S = 0.25
"""Seconds between two tries."""


def main(directory: Path, ended: Event) -> int:
    """Settle the run of the supervisor that waits for this process; 1 if the disk takes no result."""

    def record(kind: str, **fields: str | None) -> None:
        with suppress(OSError):
            event = msgspec.convert({"t_ns": time.monotonic_ns(), "kind": kind, **fields}, Event)
            Appender(directory / run_directory.EVENTS_FILE).write(event)

    result = settle(directory, ended, lambda verdict: record("state", state=verdict.state, reason=verdict.reason))
    for attempt in range(RESULT_TRIES):
        try:
            _write_result(directory, result)
        except OSError as error:
            if not attempt:
                sentence = f"{run_directory.RESULT_FILE} cannot be written: {error.strerror}"
                print(sentence, file=sys.stderr)
                record("trouble", detail=sentence)
            time.sleep(PAUSE_S)
        else:
            return 0
    return 1


def _write_result(directory: Path, result: Result) -> None:
    """Write `result.json`. Raises OSError."""
    write_atomically(directory / run_directory.RESULT_FILE, msgspec.json.encode(result) + b"\n")


if __name__ == "__main__":
    status = main(Path(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Event))
    sys.stderr.flush()
    # At once: a reader of the result waits for the lock too, which this process holds.
    os._exit(status)
