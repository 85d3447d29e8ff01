"""Take the steps of a batch search that `decide` chooses, record each outcome, and end every process."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_directory import TELEMETRY_FILE
from trainfast_runner.records.tick import Tick, read_ticks
from trainfast_runner.records.worker_lines import ProbeLine
from trainfast_runner.running import planning
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.batch.answer import answer_of, explain_nothing_fits
from trainfast_runner.search.batch.decide import BatchState, decide, predict_size, state_of_batch_journal
from trainfast_runner.search.batch.plan import SCRIPT_PROBE_STEPS, UNTIMED_SCRIPT_STEPS, BatchPlan
from trainfast_runner.search.batch.probe_record import (
    confirmation_record,
    fitting_probe,
    peaks_of_run,
    probe_of,
    probe_of_ended_run,
    script_peaks,
    size_that_data_fills,
    unusable_reason,
)
from trainfast_runner.search.batch_journal import (
    CONFIRM_STEP,
    BatchEnded,
    BatchLaunched,
    BatchLine,
    BatchQuestion,
    ConfirmationRun,
    Predicted,
    Probe,
    RankPeaks,
    read_batch_journal,
)
from trainfast_runner.search.conductor import (
    Conductor,
    OrphanedRuns,
    SearchCaller,
    WarmProcess,
    conduct_alone,
    end_text,
    raise_if_stopped,
    wait_until,
)
from trainfast_runner.search.fitted_memory import SCRIPT_PHASE, free_gpu_bytes, smallest_limit, with_limits
from trainfast_runner.search.journal import Conducted, EndState
from trainfast_runner.search.searches import BatchSearchOptions, incompatible_reason
from trainfast_runner.settings.knob_values import KnobValues
from trainfast_runner.units import mebibytes
from trainfast_runner.worker.shared.words import CONFIRMATION, PROBE

UNTIMED_CONFIRMATION_STEPS = 3
"""Steps of a confirmation run before the timed ones; fewer where that would leave none."""


FIRST_PROBE_STEPS = {"cpu": 2, "cuda": 4}
"""Optimizer steps of a process's first probe: the optimizer's states exist from the second on, and a GPU's first steps
are slow."""
LATER_PROBE_STEPS = {"cpu": 1, "cuda": 4}
"""Optimizer steps of a process's later probes. A step under strict malloc thresholds is no faster the second time."""
EXTRA_PREDICTION_WAIT_S = 5.0
"""A search waits for its prediction as long as its first process took to be ready, and this longer."""
GPU_PREDICTION_WAIT_S = 30.0
"""A search on a GPU waits for its prediction at most this long before its first process takes the GPU."""


class BatchConductor(Conductor[BatchLine, BatchEnded]):
    """Conducts a batch search: tries sizes, and confirms the largest that fits in a fresh process.

    A preset's sizes are tried in a warm process, each of a script's in a process of its own.
    """

    _options: BatchSearchOptions
    """The options with those of batch searches alone."""

    def __init__(
        self,
        directory: Path,
        batch_plan: BatchPlan,
        home: Home,
        options: BatchSearchOptions,
        caller: SearchCaller[BatchLine],
    ) -> None:
        lines = read_batch_journal(directory)
        question = next(line for line in lines if isinstance(line, BatchQuestion))
        plan = with_limits(on_gpus(batch_plan.plan, question.device_uuids), tuple(question.limits_bytes))
        super().__init__(directory, plan, home, lines, options, caller)
        self._plan_script_run = batch_plan.plan_script_run
        recorded = {line.run_id for line in lines if isinstance(line, Probe | ConfirmationRun)}
        self._orphans = OrphanedRuns(home, directory.name, recorded, PROBE, CONFIRMATION, is_new=len(lines) == 1)

    def conducted_line(self, conducted: Conducted) -> Conducted:
        """Return the line with this search's options."""
        return msgspec.structs.replace(
            conducted, no_oom=self._options.no_oom, confirmation_steps=self._options.confirmation_steps
        )

    def open(self) -> None:
        """End an orphaned process and predict the largest size."""
        self._orphans.end_trying_runs()
        if any(isinstance(line, (Predicted, Probe)) for line in self._lines):
            return
        if self._plan_script_run is None:
            self._predict()
        else:
            # Nothing is known of a script's memory yet: it starts with its own size.
            own_batch = self._plan_script_run({}).spec.knobs.get("batch_size")
            start = own_batch if isinstance(own_batch, int) else 1
            self._write(Predicted(start=start, reason="the memory of a script is predicted from its probes"))

    def step(self) -> BatchEnded | None:
        """Decide and take one step."""
        decision = decide(self._state())
        step = decision.step
        self._write(step)
        if step.action == "probe" and step.batch_size is not None:
            probe = self._probe if self._plan_script_run is None else self._probe_script
            return probe(step.batch_size)
        self._runs.end_process()
        if step.action == CONFIRM_STEP and step.batch_size is not None:
            self._confirm(step.batch_size)
            return None
        assert decision.end_state is not None, "a decision to end has its state"
        if decision.end_state == "nothing_fits" and self._plan_script_run is None:
            return explain_nothing_fits(self._plan, self._home, self._state(), step.why, self._raise_if_cancelled)
        answer = answer_of(self._state()) if decision.end_state == "answered" else None
        return BatchEnded(state=decision.end_state, reason=step.why, answer=answer)

    def end_line(self, state: EndState, reason: str) -> BatchEnded:
        """Return an end without an answer."""
        return BatchEnded(state=state, reason=reason)

    def _confirm(self, batch_size: int) -> None:
        """Make the confirmation run, a normal run with data, or adopt that of a killed conductor."""
        began_s, steps = self._runs.clock_s(), self._options.confirmation_steps
        plan = self._plan_size(batch_size, steps, min(UNTIMED_CONFIRMATION_STEPS, steps - 1))
        directory = self._adopt_confirmation(plan) or self._start(plan, CONFIRMATION)
        result = self._runs.wait_for_end(directory)
        ranks = self._confirmed_peaks(directory)
        seconds = self._runs.clock_s() - began_s
        self._write(confirmation_record(self._state(), ranks, result, batch_size, seconds))

    def _start(self, plan: RunPlan, role: str) -> Path:
        return self._record_launch(self._runs.start(plan, role), role)

    def _record_launch(self, directory: Path, role: str) -> Path:
        """Write that a run was started, or taken over, and return its directory."""
        self._write(BatchLaunched(run_id=directory.name, role=role))
        return directory

    def _adopt_confirmation(self, plan: RunPlan) -> Path | None:
        """Return the plan's run of a killed conductor, its launch recorded; None without one."""
        adopted_run = self._orphans.adopt_measuring_run(plan)
        launched_run_ids = {line.run_id for line in self._lines if isinstance(line, BatchLaunched)}
        if adopted_run is not None and adopted_run.name not in launched_run_ids:
            self._record_launch(adopted_run, CONFIRMATION)
        return adopted_run

    def _state(self) -> BatchState:
        return state_of_batch_journal(self._lines, no_oom=self._options.no_oom)

    def _predict(self) -> None:
        """Get a warm process and a prediction before the first size is chosen: both at once on a CPU."""
        cancelled = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            prediction = pool.submit(predict_size, self._plan, cancelled)
            try:
                if self._plan.device == "cuda":
                    # The tracer's CUDA context would be missing from the memory that the warm process finds free.
                    wait_until(prediction.done, self._raise_if_cancelled, time.monotonic() + GPU_PREDICTION_WAIT_S)
                    cancelled.set()
                    prediction.result()
                began_s = self._runs.clock_s()
                process = self._ready_process()
                # A prediction saves a few sizes, so waiting about as long as for the process is worth it.
                wait_s = self._runs.clock_s() - began_s + EXTRA_PREDICTION_WAIT_S
                if process is not None:
                    wait_until(prediction.done, self._raise_if_cancelled, time.monotonic() + wait_s)
            finally:
                cancelled.set()
        if process is not None:
            limit_bytes = smallest_limit(self._plan, process.available_bytes)
            self._write(prediction.result().against(self._plan, limit_bytes))

    def _probe(self, batch_size: int) -> BatchEnded | None:
        """Try one size in the warm process and write its `Probe`; return the end if nothing more can be tried."""
        process = self._runs.process or self._ready_process()
        if process is None:
            return None
        is_first = not any(probe.run_id == process.directory.name for probe in self._state().probes)
        steps = (FIRST_PROBE_STEPS if is_first else LATER_PROBE_STEPS)[self._plan.device]
        began_ns = time.monotonic_ns()
        replies = process.probe(batch_size, steps)
        seconds = (time.monotonic_ns() - began_ns) / 1e9
        if replies is None:
            # No rank answered: an error other than an OOM, or the run was killed, by the kernel or from outside.
            result = self._runs.wait_for_process_end()
            raise_if_stopped(result)
            if result.state != "oom":
                return BatchEnded(state="failed", reason=end_text(result))
            self._write(probe_of_ended_run(batch_size, result, seconds))
            return None
        void_reason = None
        if self._plan.device == "cuda":
            uuids = self._plan.device_uuids
            void_reason = void_by_others_reason(process.directory, replies, process.pids, uuids, began_ns)
        self._write(probe_of(self._state(), batch_size, process.directory.name, seconds, replies, void_reason))
        if any(line.outcome == "oom" for line in replies.values()):
            self._runs.wait_for_process_end()
        elif self._plan.spec.knobs["compile"] != "off":
            # A compiled step of another size is another program, with memory of its own.
            self._runs.end_process()
        return None

    def _ready_process(self) -> WarmProcess | None:
        """Start the warm process and return it once all ranks are ready; None if it ended before, which is recorded."""
        process = self._runs.start_process(self._plan, PROBE)
        self._record_launch(process.directory, PROBE)
        if process.ready() is not None:
            return process
        result = self._runs.wait_for_process_end()
        raise_if_stopped(result)
        if result.state != "oom":
            raise UserError(end_text(result), key=result.run_id, exit_code=4)
        # Without a batch there is nothing smaller to try: the model itself does not fit.
        self._write(probe_of_ended_run(1, result, result.seconds or 0.0, phase="model"))
        return None

    def _probe_script(self, batch_size: int) -> BatchEnded | None:
        """Try one size in a process of its own, or take the ended probe that a killed conductor left."""
        began_s = self._runs.clock_s()
        plan = self._plan_size(batch_size, SCRIPT_PROBE_STEPS, UNTIMED_SCRIPT_STEPS)
        orphan = self._orphans.adopt_trying_run(plan)
        if orphan is not None:
            self._record_launch(orphan, PROBE)
        directory = orphan or self._start(plan, PROBE)
        result = self._runs.wait_for_end(directory)
        seconds = self._runs.clock_s() - began_s if orphan is None else result.seconds or 0.0
        if result.state == "oom":
            self._write(probe_of_ended_run(batch_size, result, seconds))
            return None
        filled = size_that_data_fills(result, batch_size, self._state().largest_fitted)
        failure = unusable_reason(result) or (incompatible_reason(result, ("batch_size",)) if filled is None else None)
        if failure is not None:
            return BatchEnded(state="failed", reason=failure)
        probe = fitting_probe(directory, result, filled or batch_size, seconds, free_gpu_bytes(self._plan))
        self._write(msgspec.structs.replace(probe, fills_data=filled is not None))
        return None

    def _plan_size(self, batch_size: int, steps: int, timing_warmup: int) -> RunPlan:
        """Plan an ordinary run of one size, under the limit of the search."""
        knobs: KnobValues = {"batch_size": batch_size, "steps": steps, "timing_warmup": timing_warmup}
        if self._plan_script_run is None:
            return replace(self._plan, spec=self._plan.spec.with_overrides(**knobs))
        plan = self._plan_script_run(knobs)
        assert plan.script is not None
        return replace(
            plan,
            script=msgspec.structs.replace(plan.script, longest_first=True),
            search_id=self._plan.search_id,
            memory_limit_bytes=self._plan.memory_limit_bytes or plan.memory_limit_bytes,
        )

    def _confirmed_peaks(self, directory: Path) -> list[RankPeaks]:
        """Return the highest peaks of each rank of a confirmation run; a script's as its limit counted them."""
        if self._plan_script_run is None:
            return peaks_of_run(directory)
        return [
            msgspec.structs.replace(peaks, peak_allocated_bytes=peaks.phase_peaks[SCRIPT_PHASE])
            for peaks in script_peaks(directory, free_gpu_bytes(self._plan))
        ]


def on_gpus(plan: RunPlan, uuids: list[str]) -> RunPlan:
    """Return a preset's plan on these GPUs, even if others are freer now; a script's plan unchanged.

    Raises UserError if one of the GPUs is gone.
    """
    # A journal of a search on the CPU names none.
    if plan.script is not None or not uuids or plan.device_uuids == uuids:
        return plan
    return planning.plan_run(plan.spec, plan.python, uuids)


def conduct_batch(
    directory: Path, batch_plan: BatchPlan, home: Home, options: BatchSearchOptions, caller: SearchCaller[BatchLine]
) -> BatchEnded:
    """Conduct the search in `directory` to its end; record and return the end.

    Raises UserError when another process conducts the search, and when its device is in use.
    """
    return conduct_alone(directory, lambda: BatchConductor(directory, batch_plan, home, options, caller))


VOIDING_BYTES = 64 << 20
"""Chosen, not measured: a probe is void if another process took more than this meanwhile."""


def void_by_others_reason(
    directory: Path,
    replies: Mapping[int, ProbeLine],
    own_pids: Collection[int],
    devices: Collection[str],
    begin_ns: int,
) -> str | None:
    """Return the reason that another process voids a probe; None if no process is known to have taken GPU memory.

    Available memory shrinks when another process takes some, but also when a size loads its kernels. At the first size
    of a warm process only the driver's list of processes tells the two apart; a later size has its kernels when
    repeated.
    """
    for rank, line in sorted(replies.items()):
        if line.number == 1 or line.available_bytes is None or line.available_after_bytes is None:
            continue
        lost_bytes = line.available_bytes - line.available_after_bytes
        if lost_bytes > VOIDING_BYTES:
            return (
                f"rank {rank}'s GPU lost {mebibytes(lost_bytes)} of free memory during the probe: to another"
                " process, or to kernels that this size was the first to load"
            )
    try:
        ticks, _ = read_ticks(directory / TELEMETRY_FILE)
    except OSError:
        return None
    return others_growth_text(ticks, own_pids, devices, begin_ns)


def others_growth_text(
    ticks: Iterable[Tick], own_pids: Collection[int], devices: Collection[str], begin_ns: int
) -> str | None:
    """Return the growth of another process on the run's devices since `begin_ns`, in words; None if none grew.

    Also None if none of `own_pids` is listed: the driver's process ids are then not those of this container.
    """
    first_bytes: dict[str, dict[int, int]] = {}
    for tick in ticks:
        for device in tick.devices:
            if device.uuid not in devices or device.uuid is None or device.processes is None:
                continue
            listed = {process.pid: process.memory_used_bytes or 0 for process in device.processes}
            other_bytes = {pid: used_bytes for pid, used_bytes in listed.items() if pid not in own_pids}
            if tick.t_ns < begin_ns or device.uuid not in first_bytes:
                first_bytes[device.uuid] = other_bytes
                continue
            if len(other_bytes) == len(listed):
                continue
            for pid, used_bytes in other_bytes.items():
                growth_bytes = used_bytes - first_bytes[device.uuid].get(pid, 0)
                if growth_bytes > VOIDING_BYTES:
                    return f"process {pid} took {mebibytes(growth_bytes)} of GPU {device.index} meanwhile"
    return None
