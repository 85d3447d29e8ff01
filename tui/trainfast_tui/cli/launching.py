"""Start the runs of a command once their devices are free, and follow them to their ends.

Modules that only some uses of a command need are imported where they are used.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

from trainfast_runner.errors import UserError
from trainfast_runner.memory.oom import OutOfMemory, out_of_memory_of, trace_changes, with_newer_explanation
from trainfast_runner.records.home import Home, conducted_search_of, has_journal
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_directory import RESULT_FILE, exit_code_of, read_records, read_run_file
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.running import launch
from trainfast_runner.running.follower import Follower
from trainfast_runner.running.planning import DevicesBusy, RunPlan, busy_with, wait_for_devices
from trainfast_runner.running.present_state import STOP_GRACE_S, run_state
from trainfast_runner.running.settling import kill_now, request_stop, result_or_none_while_live, stop_unsupervised
from trainfast_runner.search.conductor import Cancelled
from trainfast_runner.worker.shared.host import print_holder
from trainfast_tui.cli.printing import print_json, print_lines, print_notice
from trainfast_tui.cli.progress import Progress, figure_lines, oom_lines, progress_when_slow
from trainfast_tui.cli.signals import Signals
from trainfast_tui.text.format import duration
from trainfast_tui.text.result_words import headline

LOOK_EVERY_S, READ_EVERY_S = 0.15, 0.6
"""Seconds between two looks at result and signals, which are cheap, and between two reads of the records, which take
CPU time from the training."""
STOPPING_NOTICE = f"stopping the run; SIGKILL follows after {STOP_GRACE_S:.0f} s, Ctrl-C again sends it now"


def refuse_script_on_hosts(**options: str | None) -> None:
    """Raise UserError if one of these options, which place a preset's run on several nodes, is given with a script."""
    for option, value in options.items():
        if value is not None:
            message = f"--{option} is for a preset: a script on several nodes has its own launcher"
            raise UserError(message, key=f"--{option}", advice="srun or torchrun after --")


def follow(directory: Path, signals: Signals, *, interrupt_stops: bool) -> Result | None:
    """Follow the run and return its result; None if it was left running.

    Raises UserError if the run's records are gone, as after `runs rm`.

    With `interrupt_stops` the first Ctrl-C asks the run to stop (SIGKILL after `STOP_GRACE_S`), the second kills it.
    """
    follower = Follower(directory)
    read_due_s, handled_interrupts = 0.0, 0
    with closing(Progress()) as progress:
        while True:
            if time.monotonic() >= read_due_s or (directory / RESULT_FILE).exists():
                read_due_s = time.monotonic() + READ_EVERY_S
                snapshot = follower.poll()
                if snapshot.is_live:
                    progress.show_run(snapshot)
                elif (result := result_or_none_while_live(directory)) is not None:
                    # The result is written a moment after the supervisor recorded the end.
                    return result
            if signals.must_leave or (signals.interrupts and not interrupt_stops):
                return None
            if signals.interrupts > handled_interrupts:
                handled_interrupts = signals.interrupts
                progress.print_line("killing the run" if handled_interrupts > 1 else STOPPING_NOTICE)
                with suppress(Cancelled):  # the next look sees the signal
                    _stop_or_kill(directory, progress, signals, kills=handled_interrupts > 1)
            time.sleep(LOOK_EVERY_S)


def stop_run(directory: Path, signals: Signals, *, kills: bool = False) -> Result | None:
    """Stop a live run, or with `kills` kill it at once, and wait with the countdown; None if Ctrl-C ended the wait."""
    # During the launch there is no supervisor yet that could stop the run.
    while (state := run_state(directory)).state == "starting" and not state.supervised:
        if signals.interrupts or signals.must_leave:
            return None
        time.sleep(LOOK_EVERY_S)
    with suppress(Cancelled):  # `follow` sees the signal
        _stop_or_kill(directory, Progress(), signals, kills=kills)
    return follow(directory, signals, interrupt_stops=False)


def _stop_or_kill(directory: Path, progress: Progress, signals: Signals, *, kills: bool) -> None:
    """Ask the supervisor to stop or kill the run; without a supervisor do it from here.

    Raises Cancelled if a signal comes before the processes of an unsupervised run have ended.
    """
    interrupts = signals.interrupts

    def on_tick(left_s: float) -> None:
        if signals.must_leave or signals.interrupts > interrupts:
            raise Cancelled
        progress.show_activity(f"stopping, SIGKILL in {max(0.0, left_s):.0f} s")

    with closing(progress), suppress(UserError):  # the run may have ended by itself
        if (kill_now if kills else request_stop)(directory):
            return
        progress.print_line("unsupervised run: stopping its processes directly")
        stop_unsupervised(directory, 0.0 if kills else STOP_GRACE_S, on_tick)


def start_when_free(plan: RunPlan, home: Home, signals: Signals, *, wait: bool) -> Path:
    """Predict the run's memory and speed, start it and return its directory; with `wait`, once its devices are free.

    Raises DevicesBusy without `wait`, and Cancelled after a signal.
    """
    from trainfast_runner.search.predicted_speed import with_predicted_speed

    def on_wait(holder: str = "") -> None:
        if signals.received.is_set():
            raise Cancelled
        print_holder(holder)

    while True:
        if wait:
            await_devices(plan, home, on_wait)
            plan = replace(plan, asked_ns=0)
        on_wait()
        predict_memory(plan, home, signals.received)
        ready = with_predicted_speed(plan, home)
        on_wait()
        try:
            return launch.start(ready, home, on_wait)
        except DevicesBusy:
            if not wait:
                raise
            on_wait()  # else wait again: another waiting run was faster


def predict_memory(plan: RunPlan, home: Home, cancelled: threading.Event) -> None:
    """Predict the run's memory before it starts, unless it is known or a trace would disturb another run.

    Setting `cancelled` ends the trace.
    """
    from trainfast_runner.machine.training_python import ProgramCancelled
    from trainfast_runner.memory.sharding import PREDICTED_STRATEGIES
    from trainfast_runner.memory.tracing import TraceProgress, cached_model, trace_model

    if plan.script is not None or plan.spec.knobs["strategy"] not in PREDICTED_STRATEGIES:
        return
    if cached_model(plan.spec, plan.device, plan.python) is not None or busy_with(plan, home) is not None:
        return

    def on_traced(tracing: TraceProgress) -> None:
        if tracing.waits_for:
            print_holder(tracing.waits_for)

    try:
        with progress_when_slow("predicting its memory…"):
            trace_model(plan.spec, plan.device, plan.python, cancelled, plan.device_uuids, on_traced)
    except ProgramCancelled:
        return
    except UserError as error:
        print_notice(f"memory is not predicted: {error.line()}")


TRACES_WITHIN_S, ENDED_WITHIN_S = 3.5, 1.0
"""Chosen, not measured: the most seconds for traces, and for the tracing process to end after them. The command is over
within 6 s of the training."""


def print_out_of_memory(directory: Path, result: Result, python: str | None, as_json: bool) -> int:
    """Print the result of an out-of-memory run, its verdict before any trace; return its exit code."""
    if as_json:
        print_notice(headline(result))
    else:
        print_lines(figure_lines(result))
        sys.stdout.flush()
    result = with_traced_changes(directory, result, python)
    if as_json:
        print_json(result)
    else:
        print_lines(oom_lines(result))
    return exit_code_of(result.state)


def with_traced_changes(directory: Path, result: Result, python: str | None) -> Result:
    """Return the result of an out-of-memory run with the changes that would fit; a script has none.

    The tracing ends after `TRACES_WITHIN_S` or at Ctrl-C; changes without a trace stay estimates.
    """
    run_file = read_run_file(directory)
    if run_file is None or run_file.script is not None:
        return result
    oom_run = out_of_memory_of(read_records(directory), run_file, result.reason, result.error)
    cancelled = threading.Event()
    # A thread, which is left behind where something in it cannot be cancelled.
    tracing = threading.Thread(target=_trace, args=(oom_run, python, cancelled), daemon=True)
    try:
        with progress_when_slow("tracing which changes would make it fit…"):
            tracing.start()
            tracing.join(TRACES_WITHIN_S)
            cancelled.set()
            tracing.join(ENDED_WITHIN_S)
    except KeyboardInterrupt:
        cancelled.set()
    return with_newer_explanation(directory, result)


def _trace(oom_run: OutOfMemory, python: str | None, cancelled: threading.Event) -> None:
    with suppress(UserError):
        for _ in trace_changes(oom_run, python, cancelled):
            pass  # the trace is in the cache now


def await_devices(plan: RunPlan, home: Home, on_poll: Callable[[], None] = lambda: None) -> int:
    """Wait until no other run or search uses the plan's devices; return the nanoseconds that this took.

    `on_poll` is called at each look, and may raise to end the wait.
    """
    progress, began_ns = Progress(), time.monotonic_ns()

    def show(run_file: RunFile, seconds: float) -> None:
        on_poll()
        search = conducted_search_of(home, run_file)
        waited_for = f"search {search.name}" if search is not None and has_journal(search) else run_file.run_id
        progress.show_activity(f"waiting for {waited_for} to end, {duration(seconds)} so far")

    with closing(progress):
        wait_for_devices(plan, home, show)
    return time.monotonic_ns() - began_ns
