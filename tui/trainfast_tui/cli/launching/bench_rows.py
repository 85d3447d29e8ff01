"""Run the rows of `bench` one after another: warm where they can share a process, else each as a run of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_states import state_text
from trainfast_runner.running import launch, planning
from trainfast_runner.running.busy_devices import DevicesBusy
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.bench.table import RowResult, needs_no_repeat
from trainfast_runner.search.bench.variants import Bench, PlannedRow, run_order
from trainfast_runner.search.bench.warm_rows import WarmRows, open_warm_rows, warm_groups
from trainfast_runner.search.conducting.run_ends import Cancelled
from trainfast_runner.worker.shared.lock_files import print_holder
from trainfast_tui.cli.launching.follow_run import follow
from trainfast_tui.cli.launching.start_run import StartedT, predict_memory, start_when_free
from trainfast_tui.cli.printing.output import print_notice
from trainfast_tui.cli.signals import Signals
from trainfast_tui.text.format import with_sizes


@dataclass(frozen=True)
class BenchOptions:
    """The options of `bench` that decide how its rows are run."""

    repeat: int = 1
    """Repetitions of every row."""
    cold: bool = False
    """True if every row takes a process of its own."""
    wait: bool = False
    """True to queue after a run on the same device."""
    python: str | None = None
    """The training Python of a preset's rows; None for the default."""


class BenchRows:
    """Runs the rows of a bench with the command's options."""

    def __init__(self, home: Home, signals: Signals, options: BenchOptions) -> None:
        self._home, self._signals, self._options = home, signals, options

    def run(self, bench: Bench, results_by_row: Mapping[str, list[RowResult]]) -> bool:
        """Run all rows and append to their results; return False if a signal or a stopped row ended the bench early.

        A row whose device another run has taken is not run. Raises DevicesBusy if no row was measured before.
        """
        # Only presets can share a warm process: a script's rows are launched.
        is_cold = self._options.cold or any(planned.plan is not None for planned in bench.rows)
        groups = {} if is_cold else warm_groups(bench)
        total = len(bench.rows) * self._options.repeat
        with open_warm_rows(self._home, self._raise_if_ended) as warm:
            for number, planned in enumerate(run_order(bench, self._options.repeat, groups), start=1):
                if needs_no_repeat(results_by_row[planned.id]):
                    continue
                if self._is_ended:
                    return False
                group = groups.get(planned.id)
                row_words = f"{bench.preset} {number}/{total}: {planned.id}{', warm' if group else ''}"
                print_notice(row_words)
                has_measured = any(isinstance(ran, Result) for ran in chain.from_iterable(results_by_row.values()))
                result = self._result_of(planned, group, warm, bench.varied, may_skip=has_measured)
                if result is None:
                    return False
                results_by_row[planned.id].append(result)
                _print_row_result(result)
                if isinstance(result, Result) and self._ends_bench(result):
                    return False
        return True

    def _result_of(
        self, planned: PlannedRow, group: str | None, warm: WarmRows, varied: tuple[str, ...], *, may_skip: bool
    ) -> RowResult | None:
        """Run one row as `run_row` and return its result; None if a signal ended a wait.

        The result is an error if another run has taken the device and the bench `may_skip` the row, or if a script's
        row ran with other values of the `varied` knobs.
        """
        try:
            result = self.run_row(planned, group, warm)
        except DevicesBusy as busy:
            if not may_skip:
                raise
            return busy
        except Cancelled:
            return None
        if planned.plan is not None and isinstance(result, Result):
            return _refused_if_overridden(result, varied)
        return result

    def run_row(self, planned: PlannedRow, group: str | None, warm: WarmRows) -> RowResult | None:
        """Run one row to its end; return the UserError if it cannot run here, None if the terminal has gone.

        Raises DevicesBusy if another run uses the row's device, without --wait; Cancelled if a signal ends a wait.
        """
        try:
            plan = planning.plan_run(planned.spec, self._options.python) if planned.plan is None else planned.plan()
        except UserError as error:
            return error
        if group is not None and warm.has_process(group):
            return warm.train(plan)
        warm.end()
        if group is not None:
            self._start_when_free(plan, group, lambda ready: warm.start(ready, group, self._on_wait))
            return warm.train(plan)
        directory = self._start_when_free(plan, group, lambda ready: launch.start(ready, self._home, self._on_wait))
        return follow(directory, self._signals, interrupt_stops=True)

    def _start_when_free(self, plan: RunPlan, group: str | None, start: Callable[[RunPlan], StartedT]) -> StartedT:
        """Start a process; with --wait retry if another run took the device during the preparation."""
        return start_when_free(
            plan,
            self._home,
            lambda plan: self._prepare(plan, group),
            start,
            wait=self._options.wait,
            raise_if_ended=self._raise_if_ended,
        )

    def _prepare(self, plan: RunPlan, group: str | None) -> RunPlan:
        """Predict the memory of a row that is a run of its own; return the plan."""
        if group is None:
            predict_memory(plan, self._home, self._signals.received)
        return plan

    @property
    def _is_ended(self) -> bool:
        """True after Ctrl-C, or once the terminal is closed."""
        return bool(self._signals.interrupts or self._signals.must_leave)

    def _raise_if_ended(self) -> None:
        if self._is_ended:
            raise Cancelled

    def _on_wait(self, holder: str) -> None:
        self._raise_if_ended()
        print_holder(holder)

    def _ends_bench(self, result: Result) -> bool:
        """True after a row that was stopped, or whose failure came with Ctrl-C."""
        return result.state == "stopped" or (result.state != "finished" and bool(self._signals.interrupts))


def _print_row_result(result: RowResult) -> None:
    """Print why a row has no figure; nothing for one that finished."""
    if isinstance(result, UserError):
        state = "not run" if isinstance(result, DevicesBusy) else "refused"
        print_notice(f"{state}: {result.line()}")
    elif result.state != "finished":
        print_notice(f"{state_text(result.state)}: {with_sizes(result.reason)}")


def _refused_if_overridden(result: Result, varied: tuple[str, ...]) -> RowResult:
    """Return the result of a script's row, or the UserError for a value that the script overrode."""
    from trainfast_runner.search.script_runs import incompatible_reason

    why = incompatible_reason(result, varied)
    return result if why is None else UserError(why, key=result.run_id)
