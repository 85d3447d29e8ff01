"""Figures for the diagnosis rules, from the records of one window of a run. Unknown figures are None."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from trainfast_runner.known_values import highest, last_known, lowest, mean_of_known
from trainfast_runner.machine.telemetry.throttle import CAUSES, slows_down_at_c
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.results.bottleneck.measured_window import MeasuredWindow
from trainfast_runner.results.bottleneck.rules import ALL_CORES_BUSY_PERCENT, Figure, Scope
from trainfast_runner.results.device_conditions import DeviceConditions, window_of
from trainfast_runner.settings.strategy_of_run import strategy_or_single

Figures = dict[str, Figure]
PIDS_SHOWN = 3
FAR_UNDER_C = 10.0
"""Chosen, not measured: degrees C under its limit at which a chip does not slow down for its own heat."""
BACKWARD_OVER_FORWARD = 2.0
BACKWARD_OVER_FORWARD_RECOMPUTED = 3.0
"""Time of a backward in forwards; full checkpointing computes the forward once more."""

SLEEP_ADVICE = "run again beside them: a launch that sees them lets the threads sleep (OMP_WAIT_POLICY=PASSIVE)"
SLEEP_ADVICE_FOR_SCRIPTS = (
    "run again with OMP_WAIT_POLICY=PASSIVE, which lets the threads sleep unless the script sets its own policy"
)


def figure_text(value: float) -> str:
    """Three significant digits, never an exponent."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def figures_by_scope(window: MeasuredWindow) -> dict[Scope, list[Figures]]:
    """Figures for the run, for each device and for each rank; each set includes the run's."""
    run = _run(window) | _loading(window) | _exchange(window) | _host(window)
    devices = [run | figures for figures in _devices(window)]
    return {"run": [run], "device": devices, "rank": [run | figures for figures in _ranks(window)]}


def _run(window: MeasuredWindow) -> Figures:
    knobs, step_ms = window.run.knobs, window.mean_ms("step")
    utilization = _lowest_utilization(window)
    data_percent = _percent(window.mean_ms("data"), step_ms)
    accumulation = _whole_or_none(knobs.get("grad_accum"))
    return {
        "steps": len(window.first_rank),
        "step_ms": step_ms,
        **{f"{phase}_ms": window.mean_ms(phase) for phase in ("data", "forward", "backward")},
        "data_percent": data_percent,
        "device": window.run.device,
        "wait_policy": window.run.threads.wait if window.run.threads else None,
        "sleep_advice": SLEEP_ADVICE if window.run.script is None else SLEEP_ADVICE_FOR_SCRIPTS,
        "world_size": window.run.world_size,
        **{
            name: _figure_or_none(knobs.get(name)) for name in ("strategy", "precision", "batch_size", "compile", "p2p")
        },
        "more_accum": None if accumulation is None else 2 * accumulation,
        "tokens_per_micro_batch": _tokens(window),
        "alloc_retries": _retries(window),
        "peak_reserved_bytes": highest(step.peak_reserved_bytes for step in window.first_rank),
        "gpu_utilization_percent": utilization,
        "gpu_idle_percent": None if utilization is None else 100 - utilization,
        **_idle(utilization, data_percent, step_ms),
    }


def _idle(utilization: float | None, data_percent: float | None, step_ms: float | None) -> Figures:
    """The time in which a GPU ran nothing though it had its data."""
    if utilization is None or data_percent is None or step_ms is None:
        return {"unexplained_idle_percent": None, "unexplained_idle_ms": None}
    # The GPU is idle while it waits for data, too, and that wait has a rule of its own.
    percent = 100 - utilization - data_percent
    return {"unexplained_idle_percent": percent, "unexplained_idle_ms": percent / 100 * step_ms}


def _loading(window: MeasuredWindow) -> Figures:
    cores = last_known(host.cpu_count for host in window.hosts)
    workers = _whole_or_none(window.run.knobs.get("workers"))
    return {
        "workers": workers,
        "cores": cores,
        "spare_cores": None if cores is None or workers is None else cores - workers,
        "more_workers": None if workers is None else max(1, min(int(cores or 2), 2 * workers or 2)),
    }


def _exchange(window: MeasuredWindow) -> Figures:
    """The link, and the part of the backward that waits for it."""
    step_ms = window.mean_ms("step")
    forward_ms = window.mean_ms("forward")
    backward_ms = window.mean_ms("backward")
    recomputes = window.run.knobs.get("checkpointing") == "full"
    expected_ratio = BACKWARD_OVER_FORWARD_RECOMPUTED if recomputes else BACKWARD_OVER_FORWARD
    on_gpus = window.run.device == "cuda"
    link = window.run.link if on_gpus else "shared memory"
    advice = "a larger batch_size computes more for each exchange"
    if on_gpus and window.run.knobs.get("p2p") == "off":
        advice = "p2p=on lets the GPUs reach each other directly"
    elif link is not None and not link.startswith("NV") and on_gpus:
        advice = f"the slowest link among these GPUs is {link}: ddp or pp send the least"
    elif not on_gpus:
        advice = "processes on one CPU share its cores: strategy=single has no exchange"
    figures: Figures = {"link": link, "link_advice": advice}
    if not forward_ms or backward_ms is None or not step_ms:
        return figures
    # Gradients are exchanged while the backward computes: only what makes it longer costs the step.
    expected_ms = expected_ratio * forward_ms
    exposed_ms = max(0.0, backward_ms - expected_ms)
    return figures | {
        "backward_over_forward": backward_ms / forward_ms,
        "computed_backward_ms": expected_ms,
        "exposed_ms": exposed_ms,
        "exposed_percent": 100 * exposed_ms / step_ms,
    }


def others_cpu_percent(window: MeasuredWindow) -> float | None:
    """The mean share of all cores that processes other than the run's took; None if unknown."""
    busy_percent, own_percent = _busy_percent(window), _own_percent(window)
    return None if busy_percent is None or own_percent is None else max(0.0, busy_percent - own_percent)


def _busy_percent(window: MeasuredWindow) -> float | None:
    return mean_of_known(host.cpu_percent for host in window.hosts)


def _own_percent(window: MeasuredWindow) -> float | None:
    """The mean share of all cores that the run's processes took; None if unknown."""
    cores = last_known(host.cpu_count for host in window.hosts)
    own_percent = mean_of_known(host.run.cpu_percent for host in window.hosts if host.run is not None)
    return own_percent / cores if own_percent is not None and cores else None


def _host(window: MeasuredWindow) -> Figures:
    """The host's CPU load, the run's share of the load and its cost, and the host's memory."""
    hosts = window.hosts
    cores = last_known(host.cpu_count for host in hosts)
    busy_percent = _busy_percent(window)
    others_percent = others_cpu_percent(window)
    available_bytes = lowest(host.memory_available_bytes for host in hosts)
    total_bytes = last_known(host.memory_total_bytes for host in hosts)
    swaps_bytes = [host.swap_used_bytes for host in hosts if host.swap_used_bytes is not None]
    grown_bytes = swaps_bytes[-1] - swaps_bytes[0] if swaps_bytes else None
    lost_ms, working_ms = None, window.working_ms
    # With all cores busy, the training lost the share of the cores that others took.
    are_all_busy = busy_percent is not None and busy_percent >= ALL_CORES_BUSY_PERCENT
    if are_all_busy and others_percent is not None and working_ms is not None:
        lost_ms = others_percent / 100 * working_ms
    return {
        "host_cpu_percent": busy_percent,
        "run_cpu_percent": _own_percent(window),
        "others_cpu_percent": others_percent,
        "others_cores": None if others_percent is None or not cores else others_percent / 100 * cores,
        "memory_available_bytes": available_bytes,
        "memory_available_percent": _percent(available_bytes, total_bytes),
        "swap_used_bytes": swaps_bytes[-1] if swaps_bytes else None,
        "swap_grown_bytes": grown_bytes,
        "swap_grown_mib": None if grown_bytes is None else grown_bytes / 2**20,
        "others_cost_ms": lost_ms,
        "others_lost_text": _lost_text(lost_ms),
    }


def _devices(window: MeasuredWindow) -> list[Figures]:
    used_devices = [device for device in window.devices if device.uuid in window.run.gpu_uuids]
    clocks_mhz = [device.sm_clock_mhz for device in used_devices if device.sm_clock_mhz]
    return [_device(window, device, max(clocks_mhz, default=None)) for device in window.devices]


def _device(window: MeasuredWindow, device: DeviceConditions, fastest_mhz: float | None) -> Figures:
    samples = window.samples.get(device.uuid or "", ())
    averaged = window.averaged(device.uuid or "")
    hottest_c = highest(sample.temperature_c for sample in samples)
    limit_c = last_known(slows_down_at_c(sample) for sample in samples)
    width = last_known(sample.pcie_width for sample in samples)
    widest = last_known(sample.pcie_width_max for sample in samples)
    foreign = [process for process in window.foreign if process.device == device.index]
    memory_bytes = [process.memory_used_bytes for process in foreign if process.memory_used_bytes is not None]
    clock_mhz = device.sm_clock_mhz
    behind_share = None if clock_mhz is None or not fastest_mhz else 1 - clock_mhz / fastest_mhz
    working_ms = window.working_ms if _meet_on_gpus(window.run) else None
    trains = device.uuid in window.run.device_uuids
    return {
        "index": device.index,
        "gpu": f"GPU {device.index}" if trains else f"watched GPU {device.index}",
        "shared_text": "shared with" if window.run.device_uuids else "used by",
        "waited_for_text": ": ranks that meet in every step wait for it" if _meet_on_gpus(window.run) else "",
        "used": int(device.uuid in window.run.gpu_uuids),
        **_throttling(device, window, trains=trains),
        "temperature_c": hottest_c,
        "slows_down_at_c": limit_c,
        "degrees_over_c": None if hottest_c is None or limit_c is None or hottest_c < limit_c else hottest_c - limit_c,
        "degrees_under_c": None
        if hottest_c is None or limit_c is None or hottest_c >= limit_c
        else limit_c - hottest_c,
        "cooling_advice": _cooling_advice(hottest_c, limit_c),
        "temperature_text": _temperature_text(hottest_c, limit_c),
        "power_w": mean_of_known(sample.power_w for sample in averaged),
        "power_limit_w": last_known(sample.power_limit_w for sample in samples),
        "clock_loss_percent": None if device.clock_loss_fraction is None else 100 * device.clock_loss_fraction,
        "sm_clock_mhz": clock_mhz,
        "fastest_sm_clock_mhz": fastest_mhz,
        "clock_behind_percent": None if behind_share is None else 100 * behind_share,
        "clock_behind_cost_ms": None if behind_share is None or working_ms is None else behind_share * working_ms,
        "gpu_utilization_percent": mean_of_known(sample.gpu_utilization_percent for sample in averaged),
        "pcie_width": width,
        "pcie_width_max": widest,
        "pcie_lanes_missing": None if width is None or widest is None else widest - width,
        "pcie_generation": last_known(sample.pcie_generation for sample in samples),
        "pcie_generation_max": last_known(sample.pcie_generation_max for sample in samples),
        "foreign_processes": len(foreign),
        "foreign_text": _processes_text([process.pid for process in foreign if process.pid is not None]),
        "foreign_memory_bytes": sum(memory_bytes) if memory_bytes else None,
    }


def _meet_on_gpus(run: RunFile) -> bool:
    """True if ranks on several GPUs wait for each other in every step."""
    return run.world_size > 1 and len(run.device_uuids) > 1


def _throttling(device: DeviceConditions, window: MeasuredWindow, *, trains: bool) -> Figures:
    """Throttling by cause: milliseconds a step, percent of the time, and the lost part of a step.

    Pauses between steps are as throttled as the steps. A wait for data cannot be lost to a slow clock. Without clocks
    all of the throttled time counts as lost. A run loses nothing to a GPU that it only watches.
    """
    span = window_of(window.first_rank)
    step_ms = window.mean_ms("step")
    working_ms = window.working_ms
    steps_share = None if span is None or step_ms is None else step_ms / span.ms
    figures: Figures = {}
    for cause in CAUSES:
        throttled_ms, lost_ms = (
            None if ms is None or steps_share is None else ms * steps_share
            for ms in (device.throttled_ms.get(cause.name), device.lost_ms.get(cause.name))
        )
        lost_ms = None if lost_ms is None or not trains else lowest((lost_ms, working_ms))
        cost_ms = lowest((throttled_ms, working_ms)) if lost_ms is None else lost_ms
        figures[f"{cause.name}_ms_per_step"] = throttled_ms
        figures[f"{cause.name}_percent"] = _percent(throttled_ms, step_ms)
        figures[f"{cause.name}_lost_ms_per_step"] = lost_ms
        figures[f"{cause.name}_cost_ms"] = cost_ms if trains else None
        figures[f"{cause.name}_lost_text"] = _lost_text(lost_ms) if trains else "; the run does not use it"
        figures[f"{cause.name}_source"] = device.sources.get(cause.name)
    return figures


def _lost_text(ms: float | None) -> str:
    return "" if ms is None else f": about {figure_text(ms)} ms of the median step lost"


def _processes_text(pids: Sequence[int]) -> str:
    if len(pids) == 1:
        return f"another process (pid {pids[0]})"
    shown = ", ".join(str(pid) for pid in pids[:PIDS_SHOWN])
    return f"{len(pids):,} other processes (pid {shown}{', ...' if len(pids) > PIDS_SHOWN else ''})"


def _temperature_text(hottest_c: float | None, limit_c: float | None) -> str:
    if hottest_c is None:
        return "at an unknown temperature"
    if limit_c is None:
        return f"at {hottest_c:.0f} °C"
    over_c = hottest_c - limit_c
    at = f"though its chip is at {hottest_c:.0f} °C" if over_c <= -FAR_UNDER_C else f"at {hottest_c:.0f} °C"
    if over_c > 0:
        side = f"{over_c:.0f} °C over"
    elif over_c < 0:
        side = f"{-over_c:.0f} °C under"
    else:
        side = "exactly"
    return f"{at}, {side} the {limit_c:.0f} °C at which it slows down"


def _cooling_advice(hottest_c: float | None, limit_c: float | None) -> str:
    """Advice about heat; beside a cool chip another part is hot."""
    if hottest_c is not None and limit_c is not None and hottest_c <= limit_c - FAR_UNDER_C:
        return (
            "the chip itself is cool: look at the temperature of the memory, at the regulators beside the chip, and for"
            " an outside signal (a server pulls one when its power supplies or its air are too hot)"
        )
    return "cooling: more air, a free slot beside the card, a lower power limit; the clocks come back by themselves"


def _ranks(window: MeasuredWindow) -> list[Figures]:
    forward_ms_by_rank = {
        rank: {step.step: step.forward_ms for step in steps if step.forward_ms is not None}
        for rank, steps in window.steps.items()
    }
    # Ranks may have come to different steps: only steps that all have recorded compare.
    common_steps = set.intersection(*map(set, forward_ms_by_rank.values())) if len(forward_ms_by_rank) > 1 else set()
    if not common_steps:
        return []
    mean_ms_by_rank = {
        rank: statistics.fmean(ms_by_step[number] for number in common_steps)
        for rank, ms_by_step in forward_ms_by_rank.items()
    }
    # The lower middle: of two ranks the faster one, so that the slow one stands out.
    median_ms = statistics.median_low(mean_ms_by_rank.values())
    slowest_ranks = [
        max(forward_ms_by_rank, key=lambda rank: forward_ms_by_rank[rank][number]) for number in common_steps
    ]
    return [
        {
            "rank": rank,
            "steps": len(common_steps),
            "forward_ms": forward_ms,
            "median_forward_ms": median_ms,
            "behind_ms": forward_ms - median_ms,
            "behind_percent": _percent(forward_ms - median_ms, median_ms),
            "slowest_percent": 100 * slowest_ranks.count(rank) / len(common_steps),
        }
        for rank, forward_ms in mean_ms_by_rank.items()
    ]


def _lowest_utilization(window: MeasuredWindow) -> float | None:
    """The utilization of the run's least busy GPU."""
    return lowest(
        mean_of_known(sample.gpu_utilization_percent for sample in window.averaged(uuid))
        for uuid in window.run.device_uuids
    )


def _retries(window: MeasuredWindow) -> int | None:
    """Allocator retries of the worst rank between the first and the last of these steps; each counts from its start."""
    retries_of_ranks = []
    for steps in window.steps.values():
        counts = [step.alloc_retries for step in steps if step.alloc_retries is not None]
        if counts:
            retries_of_ranks.append(counts[-1] - counts[0])
    return max(retries_of_ranks, default=None)


def _tokens(window: MeasuredWindow) -> float | None:
    """Tokens that go through the model at once on one rank, the mean of the steps: samples may vary in length."""
    steps, knobs = window.first_rank, window.run.knobs
    micro_batches = _whole_or_none(knobs.get("grad_accum"))
    if strategy_or_single(knobs).is_pipeline:
        chunks = _whole_or_none(knobs.get("micro_batches"))
        micro_batches = None if micro_batches is None or chunks is None else micro_batches * chunks
    tokens = mean_of_known(step.tokens for step in steps)
    return tokens / micro_batches if tokens and micro_batches else None


def _percent(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else 100 * part / whole


def _whole_or_none(value: object) -> int | None:
    """The value of a knob that takes whole numbers; None if a script does not tell it."""
    return value if isinstance(value, int) else None


def _figure_or_none(value: object) -> Figure:
    return value if isinstance(value, float | int | str) else None
