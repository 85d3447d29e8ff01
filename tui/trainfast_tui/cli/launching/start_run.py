"""Start a run once its devices are free, with its memory predicted before.

The modules that predict are imported where they are used, because a refused run does not need them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.running import launch
from trainfast_runner.running.busy_devices import DevicesBusy, busy_with
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.worker.shared.lock_files import print_holder
from trainfast_tui.cli.exit_codes import EXIT_HUNG_UP
from trainfast_tui.cli.launching.waits import await_devices
from trainfast_tui.cli.printing.output import print_notice
from trainfast_tui.cli.printing.progress import progress_when_slow
from trainfast_tui.cli.signals import Signals, caught_signals

StartedT = TypeVar("StartedT")


def start_when_free(
    plan: RunPlan,
    home: Home,
    prepare: Callable[[RunPlan], RunPlan],
    start: Callable[[RunPlan], StartedT],
    *,
    wait: bool,
    raise_if_ended: Callable[[], None],
) -> StartedT:
    """Call `start` with the plan that `prepare` returns, and return its result.

    With `wait`, `start` is called once no other run uses the plan's devices. Raises DevicesBusy without `wait`.
    `raise_if_ended` is called during the wait and between the steps; it may raise to end them.
    """
    while True:
        if wait:
            await_devices(plan, home, raise_if_ended)
        ready = prepare(plan)
        raise_if_ended()
        try:
            return start(ready)
        except DevicesBusy:
            if not wait:
                raise
            raise_if_ended()  # else wait again: another waiting run was faster


@contextmanager
def run_started_when_free(
    plan: RunPlan, home: Home, prepare: Callable[[RunPlan], RunPlan] = lambda plan: plan, *, wait: bool
) -> Iterator[tuple[Path, Signals]]:
    """Start a run as `start_when_free`; yield its directory, with signals caught from the start on."""
    signals = Signals()

    def raise_if_ended() -> None:
        if signals.must_leave:
            raise SystemExit(EXIT_HUNG_UP)
        if signals.interrupts:
            raise KeyboardInterrupt

    def on_wait(holder: str) -> None:
        raise_if_ended()
        print_holder(holder)

    with ExitStack() as caught:

        def start(ready: RunPlan) -> Path:
            # No earlier: a signal during the waits ends the command at once.
            caught.enter_context(caught_signals(signals))
            try:
                return launch.start(ready, home, on_wait)
            except DevicesBusy:
                caught.close()
                raise

        yield start_when_free(plan, home, prepare, start, wait=wait, raise_if_ended=raise_if_ended), signals


def predict_memory(plan: RunPlan, home: Home, cancelled: threading.Event | None = None) -> None:
    """Predict the run's memory before it starts, unless it is known or a trace would disturb another run.

    Setting `cancelled` ends the trace.
    """
    from trainfast_runner.machine.worker_programs import ProgramCancelled
    from trainfast_runner.memory.sharding import PREDICTED_STRATEGIES
    from trainfast_runner.memory.tracing import TraceProgress, cached_model, trace_model

    if plan.script is not None or plan.spec.knobs["strategy"] not in PREDICTED_STRATEGIES:
        return
    if cached_model(plan.spec, plan.device, plan.python) is not None or busy_with(plan, home) is not None:
        return

    def on_traced(tracing: TraceProgress) -> None:
        if tracing.waits_for:
            progress.print_above(partial(print_holder, tracing.waits_for))

    try:
        with progress_when_slow("predicting its memory…") as progress:
            trace_model(plan.spec, plan.device, plan.python, cancelled, plan.device_uuids, on_traced)
    except ProgramCancelled:
        return
    except UserError as error:
        print_notice(f"memory is not predicted: {error.line()}")
