"""Conduct a batch search: plan it, try the sizes that `decide` chooses, record each outcome, end every process.

A preset's sizes are tried in one warm process after another, each of a script's in a process of its own.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from trainfast_runner.errors import UserError, highest, lowest
from trainfast_runner.machine.devices import detect_machine
from trainfast_runner.machine.hosts import Host
from trainfast_runner.machine.resource_limits import read_host_free_bytes
from trainfast_runner.machine.training_python import ProgramCancelled
from trainfast_runner.memory.model import MemoryModel
from trainfast_runner.memory.oom import explain_run, models_of, out_of_memory_of, sizes_in, trace_changes
from trainfast_runner.memory.tracing import trace_model
from trainfast_runner.records.home import Home, is_conducted
from trainfast_runner.records.result import Result, RunError
from trainfast_runner.records.run_directory import read_records, read_result, read_run_file
from trainfast_runner.records.worker_lines import ScriptLine, WarmLine
from trainfast_runner.running import launch, planning
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search import searches
from trainfast_runner.search.batch_decide import BatchState, answer_of, decide, failed_runs
from trainfast_runner.search.batch_journal import (
    CONFIRM_STEP,
    BatchEnded,
    BatchQuestion,
    BatchSnapshot,
    Change,
    ConfirmationRun,
    Predicted,
    Probe,
    RankPeaks,
)
from trainfast_runner.search.conductor import Conductor, SearchCaller, WarmProcess, end_text, run_within
from trainfast_runner.search.journal import EndState, fields_of
from trainfast_runner.settings.knob_values import KnobValues
from trainfast_runner.settings.knobs import settings_of
from trainfast_runner.settings.script_preset import ScriptPreset
from trainfast_runner.settings.spec import SET_BY_A_BATCH_SEARCH, RunSpec, strategy_of
from trainfast_runner.units import mebibytes
from trainfast_runner.worker.catalog import STRATEGIES, nearest_strategy
from trainfast_runner.worker.shared.host import print_holder
from trainfast_runner.worker.shared.memory_limit import malloc_settings
from trainfast_runner.worker.shared.words import CONFIRMATION, PROBE

SCRIPT_PROBE_STEPS, UNTIMED_SCRIPT_STEPS = 4, 2
"""Steps of a script's probe, and those before the timed ones: the optimizer's states exist from the second on."""
UNTIMED_CONFIRMATION_STEPS = 3
"""Steps of a confirmation run before the timed ones; fewer where that would leave none."""
FIRST_PROBE_STEPS = {"cpu": 2, "cuda": 4}
"""Optimizer steps of a process's first probe: the optimizer's states exist from the second on, and a GPU's first steps
are slow."""
LATER_PROBE_STEPS = {"cpu": 1, "cuda": 4}
"""Optimizer steps of a process's later probes. A step under strict malloc thresholds is no faster the second time."""
PREDICTION_WAIT_S = 30.0
"""A search waits for its prediction at most this long before its first process, which a trace would disturb."""
TRACE_CHANGES_WITHIN_S = 30.0
"""If nothing fits, changes that would help are traced for at most this long; the others are listed unpredicted."""
VOIDING_BYTES = 64 << 20
"""Chosen, not measured: a probe is void if another process took more than this meanwhile."""
CONTEXT_WITHOUT_KERNELS_BYTES = 512 << 20
"""Chosen, not measured: about the GPU memory of a CUDA context without the kernels that are loaded on demand, which
`memory.headroom` counts too."""
SCRIPT_PHASE = "step"
"""The phase of a script's peak: its hooks see no phases of memory."""
PEAK_FIELDS = ("phase_peaks", "peak_allocated_bytes", "peak_reserved_bytes")
"""Fields of the same name in a reply, a rank's peaks and a probe."""


@dataclass(frozen=True)
class BatchPlan:
    """A checked batch search: the plan of its runs, and the planner of a script's probes."""

    plan: RunPlan
    plan_script_run: searches.ScriptPlanner | None = None
    """Plans the probes of a script; None for a preset."""


def plan_spec_batch(spec: RunSpec, python: str | None, hosts: Sequence[Host] = ()) -> BatchPlan:
    """Return the checked plan of a batch search of a preset, on these hosts, or a script. Raises UserError."""
    if spec.script is not None:
        return plan_script_batch(spec.script, settings_of(spec.knobs, spec.overrides), python)
    plan = planning.plan_run(spec, python, hosts=hosts)
    engine, strategy = plan.spec.knobs["engine"], strategy_of(plan.spec.knobs)
    if not strategy.batch_searchable:
        raise UserError(
            f"search max-batch cannot try batch sizes with strategy={strategy.name}",
            key="strategy",
            allowed=[name for name, entry in STRATEGIES.items() if entry.batch_searchable],
            nearest=nearest_strategy(strategy, lambda entry: entry.batch_searchable),
        )
    if engine != "native":
        words = f"search max-batch tries sizes with engine=native, not engine={engine}"
        raise UserError(words, key="engine", allowed=["native"], nearest="native")
    malloc_names = malloc_settings(os.environ) if plan.device == "cpu" else []
    if malloc_names:
        raise UserError(
            f"{', '.join(malloc_names)}: a batch search on the CPU measures memory by malloc thresholds of its own",
            key=malloc_names[0],
            advice=f"env -u {' -u '.join(malloc_names)} trainfast-tui search ...",
        )
    return BatchPlan(plan)


def plan_script_batch(preset: ScriptPreset, settings: Sequence[str], python: str | None) -> BatchPlan:
    """Return the checked plan of a script's batch search. Raises UserError."""
    plan_script_run = searches.script_planner(preset, settings, python, SET_BY_A_BATCH_SEARCH)
    plan = plan_script_run({"steps": SCRIPT_PROBE_STEPS, "timing_warmup": UNTIMED_SCRIPT_STEPS})
    if plan.device == "cuda" and plan.memory_limit_bytes is None and free_gpu_bytes(plan) is None:
        raise limit_unknown_error()
    return BatchPlan(plan, plan_script_run)


def open_batch(batch_plan: BatchPlan, home: Home, options: searches.SearchOptions) -> Path:
    """Return the directory of the search this plan continues, or of a new one with its first line written."""
    plan = batch_plan.plan
    limits = searches.limits_of(plan)
    question = BatchQuestion(
        **plan.spec.record_fields(),
        device=plan.device,
        world_size=plan.world_size,
        device_uuids=plan.device_uuids,
        limits_bytes=list(limits.by_rank),
        limit_words=limits.source,
    )
    gpus = detect_machine(plan.versions).gpus if plan.device == "cuda" else ()
    key = searches.key_of_question(question, plan, gpus, SET_BY_A_BATCH_SEARCH)
    return searches.open_search(question, key, home, options, _limits_still_fit)


def _limits_still_fit(directory: Path) -> bool:
    """True if the free memory still covers the limits that the search began with: with less the machine would swap.

    The processes of a conducted search hold a part of the memory that was free when it began.
    """
    question = BatchSnapshot.read(directory).question
    limits_bytes = question.limits_bytes if question is not None and question.device == "cpu" else []
    return is_conducted(directory) or not limits_bytes or sum(limits_bytes) <= read_host_free_bytes()


class BatchConductor(Conductor[BatchEnded]):
    """Conducts a batch search: tries sizes, and confirms the largest that fits in a fresh process."""

    JOURNAL = BatchSnapshot

    def __init__(
        self, directory: Path, batch_plan: BatchPlan, home: Home, options: searches.SearchOptions, caller: SearchCaller
    ) -> None:
        super().__init__(directory, home, options, caller)
        question = self._state().asked
        plan = with_limits(on_gpus(batch_plan.plan, question.device_uuids), tuple(question.limits_bytes))
        self._plan = replace(plan, search_id=directory.name)
        self._plan_script_run = batch_plan.plan_script_run
        self._try = self._try_in_warm_process if batch_plan.plan_script_run is None else self._try_in_own_process

    def open(self) -> None:
        """Predict the largest size."""
        if any(isinstance(line, Predicted | Probe) for line in self._lines):
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
        step = decide(self._state())
        self._write(step)
        if step.end_state is None and step.batch_size is not None:
            tried = (self._confirm if step.action == CONFIRM_STEP else self._try)(step.batch_size)
            if isinstance(tried, BatchEnded):
                return tried
            self._write(tried)
            return None
        self._runs.end_process()
        assert step.end_state is not None, "a step to the end has its state"
        if step.end_state == "nothing_fits" and self._plan_script_run is None:
            return explain_nothing_fits(self._plan, self._home, self._state(), step.why, self._raise_if_cancelled)
        answer = answer_of(self._state()) if step.end_state == "answered" else None
        return BatchEnded(state=step.end_state, reason=step.why, answer=answer)

    def end_line(self, state: EndState, reason: str) -> BatchEnded:
        """Return an end without an answer."""
        return BatchEnded(state=state, reason=reason)

    def _state(self) -> BatchState:
        return BatchState(tuple(self._lines), no_oom=self._options.no_oom)

    def _predict(self) -> None:
        """Predict the memory by the standby, which then is the warm process, before the first size is chosen."""
        model, reason = None, ""
        launch.keep_standby(self._plan, self._home)
        try:
            model = run_within(PREDICTION_WAIT_S, partial(trace_size_model, self._plan), self._raise_if_cancelled)
        except UserError as error:
            reason = f"no prediction ({error.message}); sizes are found by trying them"
        process = self._ready_process()
        if isinstance(process, Probe):
            self._write(process)
            return
        limit_bytes = min(self._plan.memory_limit_bytes or (), default=process.available_bytes)
        if limit_bytes is None:
            raise limit_unknown_error()
        self._write(Predicted(reason=reason) if model is None else predicted_size(model, self._plan, limit_bytes))

    def _ready_process(self) -> WarmProcess | Probe:
        """Start the warm process and return it once all ranks are ready, or the probe if memory ran out before."""
        process = self._runs.start_process(self._plan, PROBE)
        if process.ready() is not None:
            return process
        result = self._runs.wait_for_process_end()
        if result.state != "oom":
            raise UserError(end_text(result), key=result.run_id, exit_code=4)
        # Without a batch there is nothing smaller to try: the model itself does not fit.
        return probe_of_oom_run(1, result, result.seconds or 0.0, phase="model")

    def _try_in_warm_process(self, batch_size: int) -> Probe | BatchEnded:
        """Try one size in the warm process; return its record, or the end if nothing more can be tried."""
        earlier, run_ids = self._runs.process, {line.run_id for line in self._lines if isinstance(line, Probe)}
        # A compiled step of another size is another program, with memory of its own.
        takes_one_size = self._plan.spec.knobs["compile"] != "off"
        if earlier is not None and (earlier.ended_by_error or (takes_one_size and earlier.directory.name in run_ids)):
            self._runs.end_process()
        process = self._runs.process or self._ready_process()
        if isinstance(process, Probe):
            return process
        is_first = process.directory.name not in run_ids
        steps = (FIRST_PROBE_STEPS if is_first else LATER_PROBE_STEPS)[self._plan.device]
        began_s = time.monotonic()
        replies = process.probe(batch_size, steps)
        seconds = time.monotonic() - began_s
        if replies is not None:
            void_reason = void_by_others_reason(replies) if self._plan.device == "cuda" else ""
            return probe_of_replies(batch_size, process.directory.name, seconds, replies, void_reason)
        # No rank answered: an error other than an OOM, or the run was killed, by the kernel or from outside.
        result = self._runs.wait_for_process_end()
        if result.state == "oom":
            return probe_of_oom_run(batch_size, result, seconds)
        return BatchEnded(state="failed", reason=end_text(result))

    def _try_in_own_process(self, batch_size: int) -> Probe | BatchEnded:
        """Try one size in a run of its own; return its record, or the end if it has no figures."""
        directory, result, seconds = self._run(batch_size, SCRIPT_PROBE_STEPS, UNTIMED_SCRIPT_STEPS, PROBE)
        if result.state == "oom":
            return probe_of_oom_run(batch_size, result, seconds)
        if result.state != "finished":
            return BatchEnded(state="failed", reason=end_text(result))
        if result.steps.measured == 0 or result.memory.peak_allocated_bytes is None:
            return BatchEnded(state="failed", reason=f"{result.run_id}: {result.reason or 'its memory is not known'}")
        filled = size_that_data_fills(result, batch_size, self._state().largest_fitted)
        overridden = searches.incompatible_reason(result, ("batch_size",)) if filled is None else None
        if overridden is not None:
            return BatchEnded(state="failed", reason=overridden)
        probe = probe_of_run(directory, result, filled or batch_size, seconds, free_gpu_bytes(self._plan))
        return msgspec.structs.replace(probe, fills_data=filled is not None)

    def _confirm(self, batch_size: int) -> ConfirmationRun:
        """Make the confirmation run, a normal run with data; return its record."""
        self._runs.end_process()
        steps = self._options.confirmation_steps
        timing_warmup = min(UNTIMED_CONFIRMATION_STEPS, steps - 1)
        directory, result, seconds = self._run(batch_size, steps, timing_warmup, CONFIRMATION)
        return confirmation_record(self._state(), peaks_of_run(directory), result, batch_size, seconds)

    def _run(self, batch_size: int, steps: int, timing_warmup: int, role: str) -> tuple[Path, Result, float]:
        """Make an ordinary run of one size under the limit of the search; return it, its result and its seconds."""
        began_s, plan = self._runs.clock_s(), self._plan
        knobs: KnobValues = {"batch_size": batch_size, "steps": steps, "timing_warmup": timing_warmup}
        if self._plan_script_run is None:
            plan = replace(plan, spec=plan.spec.with_overrides(**knobs))
        else:
            plan = self._plan_script_run(knobs)
            assert plan.script is not None
            plan = replace(
                plan,
                script=msgspec.structs.replace(plan.script, longest_first=True),
                search_id=self._plan.search_id,
                memory_limit_bytes=self._plan.memory_limit_bytes or plan.memory_limit_bytes,
            )
        directory = self._runs.start(plan, role)
        result = self._runs.wait_for_end(directory)
        return directory, result, self._runs.clock_s() - began_s


def on_gpus(plan: RunPlan, uuids: list[str]) -> RunPlan:
    """Return a preset's plan on these GPUs, even if others are freer now; a script's and that of nodes unchanged.

    Raises UserError if one of the GPUs is gone.
    """
    # A journal of a search on the CPU names none.
    if plan.script is not None or plan.placement is not None or not uuids or plan.device_uuids == uuids:
        return plan
    return planning.plan_run(plan.spec, plan.python, uuids)


def predicted_size(model: MemoryModel, plan: RunPlan, limit_bytes: int) -> Predicted:
    """Predict the largest batch under a limit of bytes per rank."""
    max_batch = model.max_batch(plan.spec, plan.world_size, limit_bytes)
    # The growth below the maximum: a correction by an earlier run bends at that run's size.
    spec = replace(plan.spec, knobs={**plan.spec.knobs, "batch_size": max(1, max_batch - 1)})
    below = model.predict(spec, plan.world_size)
    return Predicted(
        fixed_bytes=below.fixed_bytes, bytes_per_sample=below.bytes_per_sample, max_batch=max_batch, basis=below.basis
    )


def trace_size_model(plan: RunPlan, cancelled: threading.Event) -> MemoryModel:
    """Return the plan's memory model from the cache, or trace it now, which takes seconds; `cancelled` ends the trace.

    Says on stderr who makes it meanwhile. Raises UserError with the reason that there is none.
    """
    try:
        model = trace_model(
            plan.spec, plan.device, plan.python, cancelled, plan.device_uuids, lambda held: print_holder(held.waits_for)
        )
    except ProgramCancelled:
        raise UserError("the trace took too long", key="model") from None
    except OSError as error:  # as in a full temporary folder
        raise UserError(f"the trace failed: {error.strerror}", key="model") from None
    return model.corrected_for(next(iter(plan.device_names), None))


def limit_unknown_error() -> UserError:
    """The refusal of a search on a GPU that reports no free memory, without `memory_limit`."""
    words = "the free memory of the GPU is unknown"
    return UserError(words, key="memory_limit", advice="a memory_limit", option="--set memory_limit=…")


def free_gpu_bytes(plan: RunPlan) -> int | None:
    """Return the bytes that the fullest GPU has free beside a context, by estimate; None on a CPU and if unknown."""
    free_bytes = lowest(gpu.memory_free_bytes for gpu in plan.gpus)
    return None if free_bytes is None else free_bytes - CONTEXT_WITHOUT_KERNELS_BYTES


def with_limits(plan: RunPlan, by_rank: tuple[int, ...]) -> RunPlan:
    """Return the plan under these limits: on a CPU every run of the search gets them as its `memory_limit`."""
    if not by_rank or plan.memory_limit_bytes == by_rank:
        return plan
    memory_limit = "+".join(f"{limit >> 20}MiB" for limit in by_rank)
    return replace(plan, spec=plan.spec.with_overrides(memory_limit=memory_limit), memory_limit_bytes=by_rank)


def explain_nothing_fits(
    plan: RunPlan, home: Home, state: BatchState, reason: str, raise_if_cancelled: Callable[[], None]
) -> BatchEnded:
    """Return the end of a search without an answer. `raise_if_cancelled` is called throughout the traces."""
    failed_run = min(failed_runs(state), key=lambda run: run.batch_size)
    directory = home.directory(failed_run.run_id)
    if (run := read_run_file(directory)) is None:
        return BatchEnded(state="nothing_fits", reason=reason)
    # No changes are explained for a probe, so the run has no role here.
    run_of_one = msgspec.structs.replace(run, role=None, knobs={**run.knobs, "batch_size": 1}, predicted=None)
    error = result.error if (result := read_result(directory)) is not None else None
    if error is None and isinstance(failed_run, Probe):
        error = RunError(rank=failed_run.rank, phase=failed_run.phase, message=failed_run.reason)
    oom_run = out_of_memory_of(read_records(directory), run_of_one, failed_run.reason, error)
    if isinstance(failed_run, Probe) and failed_run.peak_allocated_bytes is not None:
        oom_run = replace(oom_run, held_bytes=failed_run.peak_allocated_bytes)

    with suppress(UserError, OSError):  # OSError: a full temporary folder
        run_within(
            TRACE_CHANGES_WITHIN_S,
            lambda cancelled: list(trace_changes(oom_run, plan.python, cancelled)),
            raise_if_cancelled,
        )
    explained = explain_run(oom_run, models_of(run_of_one, plan.python))
    others = (change for change in explained.changes if "batch_size" not in change.settings)
    changes = [Change(**msgspec.structs.asdict(change)) for change in others]
    missing_bytes = explained.missing_bytes or explained.asked_bytes
    return BatchEnded(state="nothing_fits", reason=reason, missing_bytes=missing_bytes, changes=changes)


def probe_of_replies(
    batch_size: int, run_id: str, seconds: float, replies: Mapping[int, WarmLine], void_reason: str = ""
) -> Probe:
    """Return the record of one size from its ranks' replies; it does not count if there is a `void_reason`."""
    ranks = [
        RankPeaks(
            rank=rank,
            available_bytes=line.available_bytes if line.available_after_bytes is None else line.available_after_bytes,
            **fields_of(line, "limit_peak_bytes", "alloc_retries", *PEAK_FIELDS),
        )
        for rank, line in sorted(replies.items())
    ]
    oom_rank = next((rank for rank, line in replies.items() if line.outcome == "oom"), None)
    if oom_rank is None and not void_reason:
        slowest_ms = max(line.step_ms[-1] for line in replies.values())
        samples = sum(line.samples or 0 for line in replies.values())
        rate = 1000 * samples / slowest_ms if slowest_ms > 0 else None
        return _probe(batch_size, run_id, seconds, ranks, step_ms=slowest_ms, samples_per_s=rate)
    line = replies[ranks[0].rank if oom_rank is None else oom_rank]
    failure = {"outcome": "void" if void_reason else "oom", "reason": void_reason or line.message or ""}
    return _probe(batch_size, run_id, seconds, ranks, oom_rank, **failure, phase=line.phase)


def probe_of_run(
    directory: Path, result: Result, batch_size: int, seconds: float, available_bytes: int | None
) -> Probe:
    """Return the record of a size that fitted in a run of its own; `available_bytes` are those of each rank."""
    ranks = [msgspec.structs.replace(peaks, available_bytes=available_bytes) for peaks in peaks_of_run(directory)]
    rate, step_ms = result.throughput.samples_per_s.typical, result.step_ms.p50
    return _probe(batch_size, result.run_id, seconds, ranks, step_ms=step_ms, samples_per_s=rate)


def probe_of_oom_run(batch_size: int, result: Result, seconds: float, phase: str | None = None) -> Probe:
    """Return the record of a size that ran out of memory before its ranks answered; `phase` if the run names none."""
    error = result.error or RunError()
    return Probe(
        batch_size=batch_size,
        outcome="oom",
        run_id=result.run_id,
        seconds=seconds,
        reason=result.reason,
        rank=error.rank,
        phase=error.phase or phase,
    )


def _probe(
    batch_size: int, run_id: str, seconds: float, ranks: list[RankPeaks], rank: int | None = None, **fields: Any
) -> Probe:
    """Return the record of one size with the peaks of `rank`, or of the fullest; `fields` override those that fit."""
    shown_ranks = (peaks for peaks in ranks if rank in (None, peaks.rank))
    shown = max(shown_ranks, key=lambda peaks: peaks.limit_peak_bytes or peaks.peak_allocated_bytes or 0)
    fitting = {
        "outcome": "fits",
        "phase": max(shown.phase_peaks, key=lambda phase: shown.phase_peaks[phase], default=None),
        "alloc_retries": sum(peaks.alloc_retries or 0 for peaks in ranks),
        **fields_of(shown, "rank", *PEAK_FIELDS),
    }
    return Probe(batch_size=batch_size, run_id=run_id, seconds=seconds, ranks=ranks, **{**fitting, **fields})


def peaks_of_run(directory: Path) -> list[RankPeaks]:
    """Return the highest peaks of each rank of a run that took a step, and its retries.

    A script's hooks see no phases: its one phase has the peak as its limit counts it.
    """
    records, ranks = read_records(directory), []
    for rank in sorted(rank for rank, steps in records.steps.items() if steps):
        totals = records.totals(rank)
        script_lines = [line for line in records.worker_lines.get(rank, []) if isinstance(line, ScriptLine)]
        # malloc keeps freed blocks, so the limit counts a little more than the resident memory.
        counted_bytes = highest(line.limit_peak_bytes for line in script_lines)
        peaks = RankPeaks(
            rank=rank,
            phase_peaks=totals.phase_peaks or {SCRIPT_PHASE: counted_bytes or totals.peak_allocated_bytes or 0},
            peak_allocated_bytes=totals.peak_allocated_bytes,
            peak_reserved_bytes=totals.peak_reserved_bytes,
            limit_peak_bytes=counted_bytes,
            alloc_retries=totals.alloc_retries,
            widths=script_lines[-1].widths if script_lines else None,
        )
        ranks.append(peaks)
    return ranks


def confirmation_record(
    state: BatchState, ranks: list[RankPeaks], result: Result, batch_size: int, seconds: float
) -> ConfirmationRun:
    """Return the record of a confirmation run of this size."""
    warm_sizes = [probe.batch_size for probe in state.probes_that_fit if probe.batch_size >= batch_size]
    return ConfirmationRun(
        batch_size=batch_size,
        run_id=result.run_id,
        state=result.state,
        reason=result.reason,
        peak_allocated_bytes=result.memory.peak_allocated_bytes,
        ranks=ranks,
        samples_per_s=result.throughput.samples_per_s.typical,
        step_ms=result.step_ms.p50,
        seconds=seconds,
        missing_bytes=missing_bytes_of(state, result.error or RunError()),
        refutes=warm_sizes if result.state == "oom" else [],
    )


def missing_bytes_of(state: BatchState, error: RunError) -> int | None:
    """Return the bytes by which a GPU's last request exceeded the rest of its rank's limit; None if unknown."""
    sizes, limit_bytes = sizes_in(error.message or ""), state.limit_bytes(error.rank or 0)
    if limit_bytes is None or not {"asked", "allocated", "reserved"} <= sizes.keys():
        return None
    return max(0, sizes["asked"] + sizes["allocated"] + sizes["reserved"] - limit_bytes)


def size_that_data_fills(result: Result, asked_size: int, largest_fitted: int) -> int | None:
    """Return the batch that ran if the script's data fills no batch of `asked_size`; None if that size ran.

    A script that ran a size as asked (`largest_fitted`, 0 before any) does not ignore the batch size.
    """
    for override in result.script.overridden if result.script is not None else ():
        ran = override.ran
        if override.knob == "batch_size" and isinstance(ran, int) and 0 < largest_fitted <= ran < asked_size:
            return ran
    return None


def void_by_others_reason(replies: Mapping[int, WarmLine]) -> str:
    """Return the reason that another process voids a probe on a GPU; empty if none is known to have taken memory.

    Available memory shrinks when another process takes some, but also when a size loads its kernels: that of a warm
    process's first size says nothing, and a later size has its kernels when repeated.
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
    return ""
