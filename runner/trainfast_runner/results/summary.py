"""The summary of a run: figures over its measured steps, from records of any completeness."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from trainfast_runner.errors import highest
from trainfast_runner.machine.calibration import peak_of
from trainfast_runner.machine.telemetry.throttle import CAUSES
from trainfast_runner.memory.oom import explain_records
from trainfast_runner.records import result as record
from trainfast_runner.records import worker_lines
from trainfast_runner.records.run_directory import RunRecords, read_records
from trainfast_runner.records.run_file import LaunchThreads, RunFile
from trainfast_runner.records.run_lines import Actual, RunStart, Step
from trainfast_runner.results.bottleneck import MeasuredWindow, diagnose, measured_window_of, steady_state_of
from trainfast_runner.results.bottleneck_rules import OTHERS_CPU_PERCENT
from trainfast_runner.results.comparison import loss_difference_of
from trainfast_runner.results.device_conditions import (
    ENERGY_COUNTER,
    INTEGRATED_POWER,
    DeviceConditions,
    Outage,
    StepConditions,
    StepJoin,
    Window,
    join_of,
    quotient,
    total_joules,
    window_of,
)
from trainfast_runner.results.distributions import median_rate, percentile, spread
from trainfast_runner.results.doubts import with_doubts
from trainfast_runner.results.script_steps import read_hook_troubles, script_figures
from trainfast_runner.results.verdict import Verdict
from trainfast_runner.settings.device_counts import ranks_with_samples
from trainfast_runner.settings.precisions import computing_precision, peak_precision
from trainfast_runner.worker.shared.memory_limit import KEPT, ORDINARY, STRICT
from trainfast_runner.worker.shared.words import STEP_PHASES

MODEL_PARALLEL_AXES = ("tp", "pp")
MIN_SAMPLES = 2
"""Samples needed within the measured steps for their energy. Steps that end before the second sample, as a fast GPU's
first ones, would get the energy of the start and the end instead."""
SCRIPTS_ALLOCATOR = "ordinary allocator"
"""Basis of a script's peak: resident memory above that after imports, with blocks that malloc keeps."""


def summarise(directory: Path, records: RunRecords, verdict: Verdict, ended_ns: int | None) -> record.Result:
    """`result.json` for records of any completeness; a figure that nothing supports is None.

    `ended_ns` is the run's end on CLOCK_MONOTONIC, where it is known.
    """
    run, ran = records.run, worker_lines.newest_of_first_rank(records.worker_lines, worker_lines.ActualLine)
    data = worker_lines.newest_of_first_rank(records.worker_lines, worker_lines.DataLine)
    measured_steps = [step for step in records.first_rank_steps if not step.warmup]
    totals = records.totals(min(records.steps, default=0))
    window = window_of(measured_steps)
    throughput, trained_samples = _throughput(records, ran)
    if measured_steps:
        # `measured_steps` may be a thinned share of the steps: scale up to all of them.
        trained_samples *= totals.measured / len(measured_steps)
    join = _join_of_run(records)
    measured_window = None
    if window and run:
        ranks = {rank: [step for step in steps if not step.warmup] for rank, steps in records.steps.items()}
        steps = {rank: measured for rank, measured in ranks.items() if measured}
        readings = records.device_samples, records.host_samples, records.events
        measured_window = measured_window_of(run, steps, window, join, *readings)
    devices = measured_window.devices if measured_window else []
    step_ms = _step_time(measured_steps)
    result = msgspec.structs.replace(
        without_figures(directory, records, verdict, ended_ns),
        synthetic_data=data.synthetic if data is not None else None,
        actual=Actual(**{name: getattr(ran, name) for name in Actual.__struct_fields__}) if ran else Actual(),
        steps=record.StepCount(measured=totals.measured, warmup=totals.warmup),
        loss=_losses(records.first_rank_steps, totals.not_finite),
        loss_difference=loss_difference_of(directory, records),
        throughput=throughput,
        step_ms=step_ms,
        flops=_flops(run, ran, throughput),
        memory=_memory(records),
        script=script_figures(directory, records),
        cpu=_cpu(records),
        energy=_window_energy(join, devices, window, trained_samples, totals.measured),
        throttle=window_throttle(devices, window, step_ms.p50),
        compile=_compile_cost(records),
        start=_start(records),
        precision=_loss_scaling(records),
        diagnosis=diagnose(measured_window) if measured_window else [],
        diagnosed=measured_window is not None and measured_window.is_long_enough,
        oom=explain_records(records, verdict.reason, verdict.error) if verdict.state == "oom" else None,
        conditions=_conditions(records, measured_steps, measured_window, join, window),
    )
    return with_doubts(result)


def without_figures(directory: Path, records: RunRecords, verdict: Verdict, ended_ns: int | None) -> record.Result:
    """The result without computed figures: the settings, the end, and unreadable records."""
    run = records.run
    result = record.Result(
        run_id=directory.name,
        state=verdict.state,
        reason=verdict.reason,
        tried=worker_lines.batch_sizes(records.tried),
        error=verdict.error,
        thinning=records.thinning,
        unreadable_lines=records.unreadable_lines,
        troubles=[event.detail for event in records.events if event.kind == "trouble" and event.detail],
    )
    if run is None:
        return result
    return msgspec.structs.replace(
        result,
        run_id=run.run_id,
        preset=run.preset,
        variant=run.variant,
        role=run.role,
        search_id=run.search_id,
        started_wall_ns=run.clock.wall_ns,
        seconds=None if ended_ns is None else (ended_ns - run.clock.monotonic_ns) / 1e9,
        knobs=run.knobs,
        overrides=run.override_values(),
        troubles=[*result.troubles, *(read_hook_troubles(directory) if run.script else ())],
    )


def _throughput(records: RunRecords, ran: worker_lines.ActualLine | None) -> tuple[record.Throughput, float]:
    """Rates of the steps that every rank has measured, and the samples of all of those steps."""
    ranks = [
        {step.step: step for step in steps if not step.warmup and step.step_ms > 0} for steps in records.steps.values()
    ]
    if not ranks:
        return record.Throughput(), 0.0
    # Ranks that share a batch each record all of it: count it once.
    sharing = math.prod((ran.mesh or {}).get(axis, 1) for axis in MODEL_PARALLEL_AXES) if ran else 1
    common = [[rank[number] for rank in ranks] for number in ranks[0] if all(number in rank for rank in ranks)]
    # As many samples are another amount of work where their lengths vary.
    lengths_vary = len({sum(step.tokens or 0 for step in steps) for steps in common}) > 1

    def rate(count: str) -> record.Spread:
        every = ([(getattr(step, count), step.step_ms) for step in steps] for steps in common)
        counted = [steps for steps in every if all(work is not None for work, _ in steps)]
        if not counted:
            return record.Spread()
        mean = sum(
            sum(work for work, _ in steps) * 1000 / sum(step_ms for _, step_ms in steps)
            for steps in zip(*counted, strict=True)
        )
        differ = lengths_vary or len({sum(work for work, _ in steps) for steps in counted}) > 1
        rates = [sum(work * 1000 / step_ms for work, step_ms in steps) / sharing for steps in counted]
        return msgspec.structs.replace(record.Spread() if differ else spread(rates, median_rate), mean=mean / sharing)

    line = worker_lines.newest_of_first_rank(records.worker_lines, worker_lines.CpuLine)
    return record.Throughput(
        samples_per_s=rate("samples"),
        tokens_per_s=rate("tokens"),
        steps_per_s=spread((1000 / steps[0].step_ms for steps in common), median_rate),
        measured_under=record.STRICT_SPEED if line is not None and line.thresholds == STRICT else None,
        predicted=records.run.predicted_speed if records.run is not None else None,
    ), sum(step.samples or 0 for steps in common for step in steps) / sharing


def _cpu(records: RunRecords) -> record.Cpu | None:
    run, line = records.run, worker_lines.newest_of_first_rank(records.worker_lines, worker_lines.CpuLine)
    if run is not None and run.script is not None:
        return record.Cpu(allocator=SCRIPTS_ALLOCATOR, has_fp16=run.cpu_has_fp16) if run.device == "cpu" else None
    if line is None:
        return None
    launch = (run.threads if run is not None else None) or LaunchThreads()
    return record.Cpu(
        **{name: getattr(line, name) for name in ("allocator", "thresholds", "threads", "wait_policy")},
        wait_policy_reason=launch.reason,
        others_cores=launch.others_cores,
        has_fp16=run.cpu_has_fp16 if run is not None else None,
    )


def _no_peak_reason(records: RunRecords) -> str | None:
    """The reason that a CPU run has no memory peak; None if it may have one."""
    line = worker_lines.newest_of_first_rank(records.worker_lines, worker_lines.CpuLine)
    if line is not None and line.thresholds == KEPT:
        return f"{line.kept_because}: peaks need malloc thresholds of ours"
    if line is not None and line.thresholds == ORDINARY:
        return (
            "timing_warmup is below 2: memory is measured in warm-up steps, and optimizer states exist from step 2 on"
        )
    return None


def _step_time(measured_steps: list[Step]) -> record.StepTime:
    times_ms = [step.step_ms for step in measured_steps]
    phases = {
        name: spread(value for step in measured_steps if (value := getattr(step, f"{name}_ms")) is not None)
        for name in STEP_PHASES
    }
    return record.StepTime(
        p50=percentile(times_ms, 0.5),
        p90=percentile(times_ms, 0.9),
        p99=percentile(times_ms, 0.99),
        mad={name: phase.mad for name, phase in phases.items() if phase.mad is not None},
        **{name: phase.median for name, phase in phases.items()},
    )


def _losses(steps: list[Step], not_finite: int) -> record.Losses:
    """The first and last losses of `steps`, a share of a rank's steps of which `not_finite` had no finite loss."""
    losses = [step.loss for step in steps if step.loss is not None or step.loss_not_finite]
    return record.Losses(
        first=record.mean_loss(losses[: record.LOSSES_IN_A_MEAN]),
        last=record.mean_loss(losses[-record.LOSSES_IN_A_MEAN :]),
        not_finite=not_finite,
        recorded=min(len(losses), 2 * record.LOSSES_IN_A_MEAN),
    )


def _flops(run: RunFile | None, ran: worker_lines.ActualLine | None, throughput: record.Throughput) -> record.Flops:
    """TFLOP/s of one device, beside the maker's peak on a GPU and the measured ceiling on either."""
    rate = throughput.samples_per_s.typical
    if run is None or ran is None or ran.model_flops_per_sample is None or rate is None:
        return record.Flops()
    tera_samples_per_s = rate / run.devices_used / 1e12
    model_tflops = ran.model_flops_per_sample * tera_samples_per_s
    hardware_tflops = model_tflops + (ran.recomputed_flops_per_sample or 0.0) * tera_samples_per_s
    precision = computing_precision(run.knobs)
    ceiling_tflops = run.calibrated_tflops.get(peak_precision(precision))
    if run.device == "cpu":
        # The ranks share the cores, of which the calibration took all.
        ceiling_tflops = quotient(ceiling_tflops, max(1, run.world_size))
        peak_tflops, source = ceiling_tflops, "measured by doctor --calibrate"
    else:
        device_peak = peak_of(ran.device_name)
        peak_tflops, source = (device_peak.of(precision), device_peak.source) if device_peak else (None, "")

    def share_of(peak: float | None, tflops: float) -> float | None:
        return tflops / peak if peak else None

    notebook_flops = ran.notebook_flops_per_sample
    return record.Flops(
        model_tflops_per_device=model_tflops,
        mfu=share_of(peak_tflops, model_tflops),
        hfu=share_of(peak_tflops, hardware_tflops),
        peak_tflops=peak_tflops,
        peak_source=source if peak_tflops else None,
        notebook_tflops_per_device=None if notebook_flops is None else notebook_flops * tera_samples_per_s,
        measured_peak_tflops=ceiling_tflops,
        of_measured_peak=share_of(ceiling_tflops, hardware_tflops),
    )


def _memory(records: RunRecords) -> record.MemoryFigures:
    """Peaks of the worst rank, warm-up steps included: a CPU run measures its memory in these alone."""
    totals = [records.totals(rank) for rank in records.steps]
    samples = (records.device_samples.get(uuid, ()) for uuid in (records.run.device_uuids if records.run else ()))
    return record.MemoryFigures(
        peak_allocated_bytes=highest(rank.peak_allocated_bytes for rank in totals),
        peak_reserved_bytes=highest(rank.peak_reserved_bytes for rank in totals),
        device_peak_used_bytes=highest(sample.memory_used_bytes for of_device in samples for _, sample in of_device),
        # A warm process tried other settings than the one that was predicted.
        predicted_bytes=records.run.predicted_bytes
        if records.run and records.run.role not in worker_lines.WARM_ROLES
        else None,
        alloc_retries=highest(rank.alloc_retries for rank in totals),
        not_measured_because=_no_peak_reason(records),
    )


def _loss_scaling(records: RunRecords) -> record.LossScaling | None:
    """The loss scale, alike on every rank; None when the loss was not scaled."""
    scales = [step.loss_scale for step in records.steps.get(0, []) if step.loss_scale is not None]
    if not scales:
        return None
    skipped = sum(isinstance(line, worker_lines.OverflowLine) for line in records.worker_lines.get(0, []))
    return record.LossScaling(loss_scale=scales[-1], skipped_steps=skipped)


def _conditions(
    records: RunRecords,
    measured_steps: list[Step],
    measured_window: MeasuredWindow | None,
    join: StepJoin,
    window: Window | None,
) -> record.RunConditions:
    run = records.run
    if run is None:
        return record.RunConditions(clean=False)
    first_samples = [(uuid, samples[0][1]) for uuid, samples in records.device_samples.items()]
    first_temperature_c = highest(sample.temperature_c for uuid, sample in first_samples if uuid in run.watch_uuids)
    lost = any(event.kind == "gpu_lost" for event in records.events)
    foreign, others_percent, measured_from_c = run.foreign_processes, None, None
    if measured_window is not None:
        # Only on the run's own GPUs; for a run on the CPU on the watched ones.
        indexes = {sample.index for uuid, sample in first_samples if uuid in run.gpu_uuids}
        foreign = [process for process in measured_window.foreign if process.device in indexes or not indexes]
        others_percent = measured_window.others_cpu_percent
        measured_from_c = highest(device.temperature_c for device in measured_window.devices)
    outages = [_outage_row(track.index, outage, window) for track in join.tracks.values() for outage in track.outages()]
    xid_events = [event for event in records.events if event.kind == "xid"]
    return record.RunConditions(
        **msgspec.structs.asdict(steady_state_of(run, measured_steps, records.device_samples)),
        start_temperature_c=first_temperature_c if run.start_temperature_c is None else run.start_temperature_c,
        measured_from_temperature_c=measured_from_c,
        foreign_processes=foreign,
        others_cpu_percent=others_percent,
        driver=run.versions.get("driver"),
        clean=run.clean and not foreign and not lost and (others_percent or 0.0) < OTHERS_CPU_PERCENT,
        started_clean=run.clean,
        outages=outages,
        xid_errors=[record.XidError(device=event.device, detail=event.detail) for event in xid_events],
    )


def _window_energy(
    join: StepJoin, devices: Sequence[DeviceConditions], window: Window | None, trained_samples: float, steps: int
) -> record.Energy:
    """Energy summed over the `devices` of the window; no figure if one device's energy is unknown or doubtful."""
    if window is None:
        return record.Energy()
    for track in join.tracks.values():
        if track.times and sum(window.begin_ns <= t_ns <= window.end_ns for t_ns in track.times) < MIN_SAMPLES:
            return record.Energy()
    doubts = (f"GPU {device.index}: {device.energy_reason}" for device in devices if device.energy_reason is not None)
    joules = total_joules(devices)
    if joules is None:
        return record.Energy(reason=next(doubts, None))
    is_integrated = any(device.energy_source == INTEGRATED_POWER for device in devices)
    return record.Energy(
        joules=joules,
        joules_per_sample=joules / trained_samples if trained_samples else None,
        joules_per_step=joules / steps if steps else None,
        source=INTEGRATED_POWER if is_integrated else ENERGY_COUNTER,
    )


def window_throttle(
    devices: Sequence[DeviceConditions], window: Window | None, step_ms: float | None
) -> record.Throttle:
    """Throttled shares of the window, for each device and the worst, beside a median step; None without samples."""
    if window is None:
        return record.Throttle()
    rows = [
        record.ThrottledDevice(
            index=device.index,
            uuid=device.uuid,
            **{f"{name}_fraction": quotient(ms, window.ms) for name, ms in device.throttled_ms.items()},
            throttled_ms=device.throttled_ms,
            lost_ms_per_step={
                # Pauses between steps lose time, too, that no step lost.
                name: None if lost is None or step_ms is None else min(1.0, lost / window.ms) * step_ms
                for name, lost in device.lost_ms.items()
            },
            clock_loss_fraction=device.clock_loss_fraction,
            temperature_c=device.temperature_c,
        )
        for device in devices
    ]
    names = (*(f"{cause.name}_fraction" for cause in CAUSES), "clock_loss_fraction")
    return record.Throttle(**{name: highest(getattr(row, name) for row in rows) for name in names}, devices=rows)


def _outage_row(index: int | None, outage: Outage, window: Window | None) -> record.RecordedOutage:
    """A time in which a watched GPU that had answered gave no reading."""
    share = 0.0
    if window is not None:
        covered_ns = min(outage.end_ns, window.end_ns) - max(outage.silent_ns, window.begin_ns)
        share = max(0, covered_ns) / (window.end_ns - window.begin_ns)
    seconds = (outage.end_ns - outage.silent_ns) / 1e9
    return record.RecordedOutage(device=index, seconds=seconds, back=outage.back, measured_fraction=share)


def read_joined_steps(directory: Path) -> list[tuple[Step, StepConditions | None]]:
    """Every readable step of the lowest rank, in order; None beside a step of a run that watches no device."""
    records = read_records(directory)
    steps = records.first_rank_steps
    join = _join_of_run(records)
    for step in steps:
        join.add(step)
    conditions = {condition.step: condition for condition in join.joined(final=True)}
    return [(step, conditions.get(step.step)) for step in steps]


def _join_of_run(records: RunRecords) -> StepJoin:
    """The samples of the devices that the run watches; of no device if `run.json` is unreadable."""
    run = records.run
    if run is None:
        return StepJoin([])
    factor = ranks_with_samples(run)
    return join_of(records.device_samples, run.watch_uuids, used_uuids=run.device_uuids, samples_factor=factor)


def step_record(step: Step, conditions: StepConditions | None) -> dict[str, Any]:
    """One object with the step's fields and those of `StepConditions`, null when unknown."""
    absent = dict.fromkeys(StepConditions.__struct_fields__)
    return {**absent, **(msgspec.structs.asdict(conditions) if conditions else {}), **msgspec.structs.asdict(step)}


def read_start_s(directory: Path) -> float:
    """Seconds from the launch to steady steps, beyond the steps' own time: imports, building, compiling.

    A training of N steps takes this and N steady steps. 0 without a measured step.
    """
    records = read_records(directory)
    steps = records.first_rank_steps
    warmup = [step for step in steps if step.warmup]
    measured_ms = [step.step_ms for step in steps if not step.warmup]
    if records.run is None or not measured_ms or not warmup:
        return 0.0
    until_steady_s = (warmup[-1].t_ns - records.run.clock.monotonic_ns) / 1e9
    return max(0.0, until_steady_s - len(warmup) * statistics.median(measured_ms) / 1e3)


def _compile_cost(records: RunRecords) -> record.CompileCost | None:
    """The time by which the steps that compiled something exceed steady steps, on the first rank.

    None for a run with compile=off, for a script, whose records do not mark compiling, and without a measured step.
    """
    run, steps = records.run, records.first_rank_steps
    measured_ms = [step.step_ms for step in steps if not step.warmup]
    if run is None or run.script is not None or run.knobs.get("compile", "off") == "off" or not measured_ms:
        return None
    steady_ms = statistics.median(measured_ms)
    return record.CompileCost(cold_seconds=sum(step.step_ms - steady_ms for step in steps if step.compiling) / 1000)


def _start(records: RunRecords) -> RunStart | None:
    """How the first rank's process came to be, and the seconds of each part of its start that has ended."""
    run, start = records.run, next((event.start for event in records.events if event.start is not None), None)
    if run is None or start is None:
        return start
    lines = records.worker_lines.get(0, [])
    phases = {line.phase: line.t_ns for line in reversed(lines) if isinstance(line, worker_lines.PhaseLine)}
    ends_ns = {
        "plan": run.clock.monotonic_ns,
        "process": next((line.t_ns for line in lines if isinstance(line, worker_lines.StartedLine)), None),
        "imports": phases.get("data"),
        "data": phases.get("model"),
        "model": phases.get("train"),
        "first_step": next((step.t_ns for step in records.steps.get(0, [])), None),
    }
    seconds, last_ns = {}, run.asked_ns
    for part, end_ns in ends_ns.items():
        if last_ns is None or end_ns is None:
            break
        seconds[part], last_ns = round((end_ns - last_ns) / 1e9, 3), end_ns
    return msgspec.structs.replace(start, seconds=seconds)
