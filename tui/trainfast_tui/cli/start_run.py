"""Start a run once its devices are free, with its memory predicted before.

The modules that predict are imported where they are used, because a refused run does not need them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.running import launch
from trainfast_runner.running.busy_devices import DevicesBusy, busy_with
from trainfast_runner.running.planning import RunPlan
from trainfast_tui.cli.follow_run import Signals, caught_signals
from trainfast_tui.cli.output import print_notice
from trainfast_tui.cli.progress import progress_when_slow
from trainfast_tui.cli.waits import await_devices
from trainfast_tui.text.format import plain


@contextmanager
def start_when_free(
    plan: RunPlan, home: Home, prepare: Callable[[RunPlan], RunPlan] = lambda plan: plan, *, wait: bool
) -> Iterator[tuple[Path, Signals]]:
    """Start the plan that `prepare` returns; yield the run's directory, with signals caught from the start on.

    With `wait` it is started once no other run uses its devices. Raises DevicesBusy otherwise.
    """
    while True:
        if wait:
            await_devices(plan, home)
        ready = prepare(plan)
        with caught_signals() as signals:
            try:
                directory = launch.start(ready, home)
            except DevicesBusy:
                if not wait:
                    raise
                continue  # another waiting run was faster
            yield directory, signals
            return


def predict_memory(plan: RunPlan, home: Home) -> None:
    """Predict the run's memory before it starts, unless it is known or a trace would disturb another run."""
    from trainfast_runner.memory.sharding import PREDICTED
    from trainfast_runner.memory.tracing import cached_model, trace_model

    if plan.script is not None or plan.spec.knobs["strategy"] not in PREDICTED:
        return
    if cached_model(plan.spec, plan.device, plan.python) is not None or busy_with(plan, home) is not None:
        return
    try:
        with progress_when_slow("predicting its memory…"):
            trace_model(plan.spec, plan.device, plan.python, gpus=plan.device_uuids)
    except UserError as error:
        print_notice(plain(f"memory is not predicted: {error.line()}"))
