"""Conduct a batch search: take the steps that `decide` chooses, record each outcome, and end every process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_file import CONFIRM, CONFIRMATION, PROBE
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.running.recovery import live_runs
from trainfast_runner.search.batch.answer import answer_of
from trainfast_runner.search.batch.decide import Decision, SearchState, decide, state_of_journal
from trainfast_runner.search.batch.journal import (
    BatchEnded,
    BatchLaunched,
    BatchLine,
    BatchQuestion,
    ConfirmationRun,
    Next,
    Predicted,
    Probe,
    read_batch_journal,
)
from trainfast_runner.search.batch.nothing_fits import nothing_fits
from trainfast_runner.search.batch.opening import BatchSearchOptions
from trainfast_runner.search.batch.predicted_size import predict_size
from trainfast_runner.search.batch.probe_record import (
    confirmation_record,
    probe_of,
    probe_of_ended_run,
    taken_by_others,
)
from trainfast_runner.search.conductor import ConductOptions, Conductor, conduct_alone
from trainfast_runner.search.journal import Conducted
from trainfast_runner.search.left_runs import end_if_live, has_settings, is_usable, runs_of_search
from trainfast_runner.search.limits import with_limits
from trainfast_runner.search.processes import Interrupted, WarmProcess, end_run, wait_for_result

STEPS = {"cpu": 2, "cuda": 4}
"""Optimizer steps of a process's first probe: the optimizer's states exist from the second on, and a GPU's first steps
are slow."""
LATER_STEPS = {"cpu": 1, "cuda": 4}
"""Optimizer steps of its later probes. A step under strict malloc thresholds is no faster the second time."""
EXTRA_WAIT_S = 5.0
"""Once its first process is ready, a search waits for its prediction as long as that took, and this much more."""
TRACE_WITHIN_S = 30.0
"""A search on a GPU waits at most this long for its prediction before its first process takes the GPU."""
TIMED_WARMUP = 3


def conduct_batch(
    directory: Path,
    plan: RunPlan,
    home: Home,
    options: BatchSearchOptions,
    *,
    on_line: Callable[[BatchLine], None] = lambda line: None,
    is_cancelled: Callable[[], bool] = lambda: False,
    began_ns: int | None = None,
    make_conductor: MakeConductor | None = None,
) -> BatchEnded:
    """Conduct the search in `directory` to its end, record that and return it. `on_line` gets every new line.

    `make_conductor` makes another conductor than that of a preset's search.

    The search's time counts from `began_ns` (CLOCK_MONOTONIC), when making the plan began.

    Raises UserError when another process conducts the search, and when its device is in use.
    """
    conduct_options = ConductOptions(options.wait, options.cool_to_c, on_line, is_cancelled, began_ns)
    make = make_conductor or BatchConductor
    return conduct_alone(directory, lambda: make(directory, plan, home, options, conduct_options))


class BatchConductor(Conductor[BatchLine, BatchEnded]):
    """Conducts a batch search: tries sizes in a warm process and confirms the largest in a fresh one."""

    def __init__(
        self,
        directory: Path,
        plan: RunPlan,
        home: Home,
        options: BatchSearchOptions,
        conduct_options: ConductOptions[BatchLine],
    ) -> None:
        lines = read_batch_journal(directory)
        asked = next(line for line in lines if isinstance(line, BatchQuestion))
        super().__init__(directory, with_limits(plan, tuple(asked.limits_bytes)), home, lines, conduct_options)
        self._options = options

    def first_line(self, conducted: Conducted) -> Conducted:
        """Return the line with this search's options."""
        return msgspec.structs.replace(conducted, no_oom=self._options.no_oom, proof_steps=self._options.proof_steps)

    def open(self) -> None:
        """End a left process and predict the largest size."""
        self._end_left_process()
        self._predict()

    def step(self) -> BatchEnded | None:
        """Decide and take one step."""
        return self._do(decide(self._state()))

    def end_line(self, state: str, reason: str) -> BatchEnded:
        """Return an end without an answer."""
        return BatchEnded(state=state, reason=reason)

    def _do(self, step: Decision) -> BatchEnded | None:
        """Take one step; return the end if it is the last."""
        action = step.action if step.action in ("probe", CONFIRM) else "end"
        self._write(
            Next(
                action=action,
                batch_size=step.batch_size,
                why=step.why,
                needs_bytes=step.needs_bytes,
                fits=list(step.fits),
                tightest_rank=step.tightest_rank,
            )
        )
        if step.action == "probe" and step.batch_size is not None:
            return self._probe(step.batch_size)
        self._end_process()
        if step.action == CONFIRM and step.batch_size is not None:
            self._confirm(step.batch_size)
            return None
        if step.action == "answer":
            return BatchEnded(state="answered", reason=step.why, answer=answer_of(self._state()))
        if step.action == "nothing_fits":
            return self._nothing_fits(step.why)
        return BatchEnded(state="failed", reason=step.why)

    def _predict(self) -> None:
        """Get a warm process and a prediction before the first size is chosen: both at once on a CPU."""
        if any(isinstance(line, (Predicted, Probe)) for line in self._lines):
            return
        cancelled = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            prediction = pool.submit(predict_size, self._plan, cancelled)
            try:
                if self._plan.device == "cuda":
                    # The tracer's CUDA context would be missing from the memory that the warm process finds free.
                    self._wait_for(prediction, time.monotonic() + TRACE_WITHIN_S)
                    cancelled.set()
                    prediction.result()
                began_s = self._clock_s()
                available = self._ready(self._warm_process())
                # A prediction saves a few sizes: worth about as long a wait as the process was.
                wait_s = self._clock_s() - began_s + EXTRA_WAIT_S
                if available is not None:
                    self._wait_for(prediction, time.monotonic() + wait_s)
            finally:
                cancelled.set()
        if available is not None:
            limits = self._plan.memory_limit_bytes or tuple(available)
            self._write(prediction.result().against(self._plan, min(limits)))

    def _ready(self, process: WarmProcess) -> list[int] | None:
        """Available memory of each rank, once all are ready; None when the process ended before, which is recorded."""
        answers = process.ready()
        if answers is not None:
            return [line.available_bytes or 0 for _, line in sorted(answers.items())]
        result = self._ended_process(process)
        if result.state != "oom":
            raise UserError(_ended_words(result), key=result.run_id, exit_code=4)
        # Without a batch there is nothing smaller to try: the model itself does not fit.
        self._write(probe_of_ended_run(1, result, result.seconds or 0.0, phase="model"))
        return None

    def _probe(self, batch_size: int) -> BatchEnded | None:
        """Try one size in the warm process."""
        process = self._process
        if process is None:
            process = self._warm_process()
            if self._ready(process) is None:
                return None
        is_first = not any(probe.run_id == process.directory.name for probe in self._state().probes)
        steps = (STEPS if is_first else LATER_STEPS)[self._plan.device]
        began_ns = time.monotonic_ns()
        answers = process.probe(batch_size, steps)
        seconds = (time.monotonic_ns() - began_ns) / 1e9
        if answers is None:
            # No rank answered: the kernel or somebody killed the run.
            result = self._ended_process(process)
            if result.state in ("stopped", "killed"):
                raise Interrupted
            if result.state != "oom":
                return BatchEnded(state="failed", reason=_ended_words(result))
            self._write(probe_of_ended_run(batch_size, result, seconds))
            return None
        void = None
        if self._plan.device == "cuda":
            uuids = self._plan.device_uuids
            void = taken_by_others(process.directory, answers, process.pids, uuids, began_ns)
        self._write(probe_of(self._state(), batch_size, process.directory.name, seconds, answers, void))
        if any(line.outcome == "oom" for line in answers.values()):
            process.wait_for_end()
            self._live = self._process = None
        elif self._plan.spec.knobs["compile"] != "off":
            # A compiled step of another size is another program, with memory of its own.
            self._end_process()
        return None

    def _confirm(self, batch_size: int) -> None:
        """Make the confirmation run, a normal run with data, or take the one of a killed conductor."""
        began_s, steps = self._clock_s(), self._options.proof_steps
        plan = self._sized(batch_size, steps, min(TIMED_WARMUP, steps - 1))
        directory = self._live = self._take_left_confirmation(plan) or self._start(plan, CONFIRMATION)
        result = wait_for_result(directory, self._raise_if_cancelled)
        self._live = None
        if result.state in ("stopped", "killed"):
            raise Interrupted
        self._write(self._confirmed(directory, result, batch_size, self._clock_s() - began_s))

    def _confirmed(self, directory: Path, result: Result, batch_size: int, seconds: float) -> ConfirmationRun:
        """Return the record of an ended confirmation run."""
        return confirmation_record(self._state(), directory, result, batch_size, seconds)

    def _sized(self, batch_size: int, steps: int, timing_warmup: int) -> RunPlan:
        """Plan an ordinary run of one size."""
        spec = self._plan.spec.with_overrides(batch_size=batch_size, steps=steps, timing_warmup=timing_warmup)
        return replace(self._plan, spec=spec)

    def _nothing_fits(self, why: str) -> BatchEnded:
        """Return the end of a search in which a batch of 1 does not fit."""
        return nothing_fits(self._plan, self._home, self._state(), why, self._raise_if_cancelled)

    def _warm_process(self) -> WarmProcess:
        directory = self._start(self._plan, "probe")
        self._process = WarmProcess(directory, self._plan.world_size, self._raise_if_cancelled)
        return self._process

    def _start(self, plan: RunPlan, role: str) -> Path:
        directory = self._launch(plan, role)
        self._write(BatchLaunched(run_id=directory.name, role=role))
        return directory

    def _end_left_process(self) -> None:
        """End the probe of a conductor that died, recorded or not; its confirmation run goes on and is followed."""
        for run in live_runs(self._home):
            if run.role == PROBE and run.search_id == self._directory.name:
                end_run(self._home.directory(run.run_id))

    def _take_left_confirmation(self, plan: RunPlan) -> Path | None:
        """Take the newest usable run of the plan that has no recorded end, and end all others; None without one.

        A killed conductor may not have recorded the launch either, which is recorded now.
        """
        ended = {line.run_id for line in self._lines if isinstance(line, ConfirmationRun)}
        taken: Path | None = None
        for run_id, run in reversed(runs_of_search(self._home, self._directory.name).items()):
            if run.role != CONFIRMATION or run_id in ended:
                continue
            directory = self._home.directory(run_id)
            if taken is None and has_settings(run, plan) and is_usable(directory):
                taken = directory
            else:
                end_if_live(directory)
        launched = {line.run_id for line in self._lines if isinstance(line, BatchLaunched)}
        if taken is not None and taken.name not in launched:
            self._write(BatchLaunched(run_id=taken.name, role=CONFIRMATION))
        return taken

    def _state(self) -> SearchState:
        return state_of_journal(self._lines, self._options.no_oom)


MakeConductor = Callable[[Path, RunPlan, Home, BatchSearchOptions, ConductOptions[BatchLine]], BatchConductor]
"""Makes the conductor of a search, with the arguments of `BatchConductor`."""


def _ended_words(result: Result) -> str:
    return f"{result.run_id} ended {result.state}: {result.reason}"
