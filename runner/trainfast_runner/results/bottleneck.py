"""The diagnosis: the rules of `bottleneck_rules` applied to the figures of a window of a run."""

from __future__ import annotations

import operator
import statistics
import string
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trainfast_runner.errors import highest, last_known, lowest, mean_of_known
from trainfast_runner.machine.telemetry.throttle import CAUSES, slows_down_at_c
from trainfast_runner.records.result import Diagnosis, SteadyState
from trainfast_runner.records.run_file import ForeignProcess, RunFile
from trainfast_runner.records.run_lines import Event, Step
from trainfast_runner.records.tick import DeviceReading, HostReading, Tick, TimedReadings, readings_by_device
from trainfast_runner.results.bottleneck_rules import ALL_CORES_BUSY_PERCENT, RULES, BottleneckRule, Figures, Scope
from trainfast_runner.results.device_conditions import DeviceConditions, StepJoin, Window, window_of
from trainfast_runner.results.distributions import steady_state
from trainfast_runner.settings.spec import strategy_or_single
from trainfast_runner.worker.catalog import LEVERS, WITH_ADAPTERS

T = TypeVar("T")

MIN_STEPS_TO_DIAGNOSE = 3
"""Measured steps needed for a diagnosis: with fewer, finding nothing means nothing."""
AVERAGED_NS = 1_000_000_000
"""The time that a reading may reach back: the driver averages utilization over 1/6 to 1 s (nvmlUtilization_t in
nvml.h) and power over a second."""


@dataclass(frozen=True)
class MeasuredWindow:
    """Measured steps of a run by rank, and the readings meanwhile: timed samples by UUID, oldest first."""

    run: RunFile
    steps: Mapping[int, Sequence[Step]]
    devices: Sequence[DeviceConditions] = ()
    samples: TimedReadings = field(default_factory=dict)
    hosts: Sequence[HostReading] = ()
    foreign: Sequence[ForeignProcess] = ()

    @property
    def first_rank(self) -> Sequence[Step]:
        """The steps of the lowest rank; empty without any."""
        return self.steps[min(self.steps)] if self.steps else ()

    @property
    def is_long_enough(self) -> bool:
        """True if there are enough steps for a diagnosis."""
        return len(self.first_rank) >= MIN_STEPS_TO_DIAGNOSE

    @property
    def others_cpu_percent(self) -> float | None:
        """The mean share of all cores that processes other than the run's took; None if unknown.

        A sampler sees the processes of its own node: with another node on the same machine the share is unknown.
        """
        addresses = [node.address for node in self.run.nodes if node.address]
        if addresses.count(addresses[0] if addresses else "") > 1:
            return None
        busy_percent = mean_of_known(host.cpu_percent for host in self.hosts)
        return _known(lambda busy, own: max(0.0, busy - own), busy_percent, self.own_cpu_percent)

    @property
    def own_cpu_percent(self) -> float | None:
        """The mean share of all cores that the run's processes took; None if unknown."""
        cores = last_known(host.cpu_count for host in self.hosts)
        own_percent = mean_of_known(host.run.cpu_percent for host in self.hosts if host.run is not None)
        return own_percent / cores if own_percent is not None and cores else None

    @property
    def working_ms(self) -> float | None:
        """The part of the median step that slow clocks or a shared CPU make longer: a wait for data is its own cause.

        A few very slow steps make the mean longer than the step that is shown, and no cause may cost more than that.
        """
        steps_ms = [step.step_ms - (step.data_ms or 0.0) for step in self.first_rank]
        return statistics.median(steps_ms) if steps_ms else None

    def mean_ms(self, phase: str) -> float | None:
        """Mean time of a phase, or of the whole "step", in ms on the lowest rank; None if no step recorded it."""
        return mean_of_known(getattr(step, f"{phase}_ms") for step in self.first_rank)

    def averaged(self, uuid: str) -> Sequence[DeviceReading]:
        """A device's samples whose utilization and power are the steps' alone; empty in a short window."""
        since_ns = self.first_rank[0].begin_ns + AVERAGED_NS
        return [sample for t_ns, sample in self.samples.get(uuid, ()) if t_ns >= since_ns]


def measured_window_of(
    run: RunFile,
    steps: Mapping[int, Sequence[Step]],
    window: Window,
    join: StepJoin,
    samples: TimedReadings,
    hosts: Sequence[tuple[int, HostReading]],
    events: Iterable[Event],
) -> MeasuredWindow:
    """The measured `steps` by rank, which take `window`, and the readings meanwhile of timed `samples` and `hosts`."""

    def within(timed: Iterable[tuple[int, T]]) -> list[tuple[int, T]]:
        return [(t_ns, reading) for t_ns, reading in timed if window.begin_ns <= t_ns <= window.end_ns]

    # Steps too short to have a sample: the newest before tells the run's share of the CPU from that of others.
    earlier = [
        (t_ns, host)
        for t_ns, host in hosts
        if t_ns < window.begin_ns and host.run is not None and host.run.cpu_percent is not None
    ]
    return MeasuredWindow(
        run=run,
        steps=steps,
        devices=join.conditions_between(window.begin_ns, window.end_ns),
        samples={uuid: within(timed) for uuid, timed in samples.items()},
        hosts=[host for _, host in within(hosts) or earlier[-1:]],
        foreign=foreign_processes(run, events, window),
    )


def foreign_processes(run: RunFile, events: Iterable[Event], window: Window) -> list[ForeignProcess]:
    """Foreign processes that used the run's devices at some time in the window, each once."""
    by_identity = {(process.device, process.pid): process for process in run.foreign_processes}
    for event in events:
        identity = event.device, event.pid
        if event.kind != "foreign_process":
            continue
        if event.state == "appeared" and event.t_ns <= window.end_ns:
            process = ForeignProcess(device=event.device, pid=event.pid, memory_used_bytes=event.memory_used_bytes)
            by_identity.setdefault(identity, process)
        # A process that left within the window still disturbed its first steps.
        elif event.state == "left" and event.t_ns < window.begin_ns:
            by_identity.pop(identity, None)
    return [process for identity, process in by_identity.items() if None not in identity]


def diagnose(window: MeasuredWindow) -> list[Diagnosis]:
    """The bottlenecks, the costliest first; one for each rule, of the device or rank with the highest cost."""
    if not window.is_long_enough:
        return []
    scopes = figures_by_scope(window)
    by_rule: dict[str, Diagnosis] = {}
    for rule in RULES:
        # Rules of one name differ in their advice, the special cases first: the first that holds is the one to follow.
        if rule.name not in by_rule:
            findings = list(filter(None, (_finding(rule, figures) for figures in scopes[rule.scope])))
            first_figure = next((figure for figure, operator, _ in rule.when if operator == ">="), "")
            if findings:
                by_rule[rule.name] = max(
                    findings, key=lambda finding: (finding.cost_ms_per_step or 0.0, finding.figures.get(first_figure))
                )
    return sorted(
        by_rule.values(), key=lambda finding: (finding.severity != "warning", -(finding.cost_ms_per_step or 0.0))
    )


class _Sentence(string.Formatter):
    """`str.format` with `figure` as a format, which is `figure_text`."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return figure_text(value) if format_spec == "figure" else str(super().format_field(value, format_spec))


def figure_text(value: float) -> str:
    """Three significant digits, never an exponent."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def _finding(rule: BottleneckRule, figures: Figures) -> Diagnosis | None:
    """The rule's finding; None unless every condition holds and every figure in its sentences is known."""
    if not rule.holds(figures):
        return None
    known = {name: value for name, value in figures.items() if value is not None}
    try:
        line, advice = (_Sentence().vformat(text, (), known) for text in (rule.line, rule.advice))
    except KeyError:
        return None
    cost_ms, step_ms = known.get(rule.cost), figures["step_ms"]
    return Diagnosis(
        rule=rule.name,
        line=line,
        advice=advice,
        severity=rule.severity,
        cost_ms_per_step=cost_ms,
        cost_fraction=cost_ms / step_ms if cost_ms is not None and step_ms else None,
        figures={name: figures.get(name) for name in (*(figure for figure, _, _ in rule.when), *rule.shown_figures)},
        device=known.get("index") if rule.scope == "device" else None,
        rank=known.get("rank") if rule.scope == "rank" else None,
    )


def _known(compute: Callable[..., T], *figures: Any) -> T | None:
    """The value computed from the figures; None if one of them is unknown."""
    return None if None in figures else compute(*figures)


def _percent(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else 100 * part / whole


PIDS_SHOWN = 3
FAR_UNDER_C = 10.0
"""Chosen, not measured: degrees C under its limit at which a chip does not slow down for its own heat."""
BACKWARD_OVER_FORWARD = 2.0
"""Time of a backward in forwards, without what it computes again."""
APART_PERCENT = 10
"""Chosen, not measured: percent of reserved memory between allocations from which the allocator may be the cause."""
EXPANDABLE = "allocator=expandable, as {:.0f} % of the reserved memory lies between allocations; else "
SLEEP_ADVICE = "run again beside them: a launch that sees them lets the threads sleep (OMP_WAIT_POLICY=PASSIVE)"
SLEEP_ADVICE_FOR_SCRIPTS = (
    "run again with OMP_WAIT_POLICY=PASSIVE, which lets the threads sleep unless the script sets its own policy"
)


def figures_by_scope(window: MeasuredWindow) -> dict[Scope, list[Figures]]:
    """Figures for the run, for each device and for each rank; each set includes the run's."""
    run = _run(window) | _exchange(window) | _host(window)
    used_devices = [device for device in window.devices if device.uuid in window.run.gpu_uuids]
    fastest_mhz = highest(device.sm_clock_mhz or None for device in used_devices)
    devices = [run | _device(window, device, fastest_mhz) for device in window.devices]
    return {"run": [run], "device": devices, "rank": [run | figures for figures in _ranks(window)]}


def _run(window: MeasuredWindow) -> Figures:
    """Steps, data, the batch and the busyness of the GPUs."""
    # A user's own script may not tell its number of something: the knob is None then.
    run, knobs, step_ms = window.run, window.run.knobs, window.mean_ms("step")
    workers, accumulated, micro_batches = (
        value if isinstance(value := knobs.get(name), int) else None
        for name in ("workers", "grad_accum", "micro_batches")
    )
    data_percent = _percent(window.mean_ms("data"), step_ms)
    utilization = lowest(
        mean_of_known(sample.gpu_utilization_percent for sample in window.averaged(uuid)) for uuid in run.device_uuids
    )
    # The GPU is idle while it waits for data, too, and that wait has a rule of its own.
    idle_percent = _known(lambda busy, waiting: 100 - busy - waiting, utilization, data_percent)
    tokens = mean_of_known(step.tokens for step in window.first_rank)
    chunks = micro_batches if strategy_or_single(knobs).is_pipeline else 1
    parts = _known(lambda accumulated, chunks: accumulated * chunks, accumulated, chunks)
    cores = last_known(host.cpu_count for host in window.hosts)
    reserved_bytes = highest(step.peak_reserved_bytes for step in window.first_rank)
    allocated_bytes = highest(step.peak_allocated_bytes for step in window.first_rank)
    unallocated_percent = _percent(_known(operator.sub, reserved_bytes, allocated_bytes), reserved_bytes)
    is_default, is_apart = knobs.get("allocator") in (None, "default"), (unallocated_percent or 0.0) >= APART_PERCENT
    retries = (
        [step.alloc_retries for step in steps if step.alloc_retries is not None] for steps in window.steps.values()
    )
    return {
        "steps": len(window.first_rank),
        **{f"{phase}_ms": window.mean_ms(phase) for phase in ("step", "data", "forward", "backward")},
        **{name: knobs.get(name) for name in ("strategy", "precision", "batch_size", "compile", "p2p", "workers")},
        "data_percent": data_percent,
        "device": run.device,
        "wait_policy": run.threads.wait if run.threads else None,
        "sleep_advice": SLEEP_ADVICE if run.script is None else SLEEP_ADVICE_FOR_SCRIPTS,
        "world_size": run.world_size,
        "more_accum": _known(lambda accumulated: 2 * accumulated, accumulated),
        # Tokens that go through the model at once on one rank: samples may vary in length.
        "tokens_per_micro_batch": tokens / parts if tokens and parts else None,
        # Each rank's count goes on from its start.
        "alloc_retries": highest(counts[-1] - counts[0] for counts in retries if counts),
        "peak_reserved_bytes": reserved_bytes,
        "unallocated_percent": unallocated_percent,
        "allocator_advice": EXPANDABLE.format(unallocated_percent) if is_default and is_apart else "",
        "gpu_utilization_percent": utilization,
        "gpu_idle_percent": _known(lambda busy: 100 - busy, utilization),
        "unexplained_idle_percent": idle_percent,
        "unexplained_idle_ms": _known(lambda percent, ms: percent / 100 * ms, idle_percent, step_ms),
        "cores": cores,
        "spare_cores": _known(lambda cores, workers: cores - workers, cores, workers),
        "more_workers": _known(lambda workers: max(1, min(cores or 2, 2 * workers or 2)), workers),
    }


def _exchange(window: MeasuredWindow) -> Figures:
    """The link, and the part of the backward that waits for it."""
    run = window.run
    link = run.link if run.device == "cuda" else "shared memory"
    if run.device != "cuda":
        advice = "processes on one CPU share its cores: strategy=single has no exchange"
    elif run.knobs.get("p2p") == "off":
        advice = "p2p=on lets the GPUs reach each other directly"
    elif link is not None and not link.startswith("NV"):
        advice = f"the slowest link among these GPUs is {link}: ddp or pp send the least"
    else:
        advice = "a larger batch_size computes more for each exchange"
    forward_ms, backward_ms = window.mean_ms("forward") or None, window.mean_ms("backward")
    # Gradients are exchanged while the backward computes: only what makes it longer costs the step.
    # Frozen weights have no gradients to compute.
    has_adapters = run.knobs.get("method") in WITH_ADAPTERS
    factor = BACKWARD_OVER_FORWARD + LEVERS["checkpointing"][run.knobs.get("checkpointing")].recomputed - has_adapters
    expected_ms = _known(lambda forward: factor * forward, forward_ms)
    exposed_ms = _known(lambda backward, expected: max(0.0, backward - expected), backward_ms, expected_ms)
    return {
        "link": link,
        "link_advice": advice,
        "backward_over_forward": _known(lambda backward, forward: backward / forward, backward_ms, forward_ms),
        "computed_backward_ms": expected_ms,
        "exposed_ms": exposed_ms,
        "exposed_percent": _percent(exposed_ms, window.mean_ms("step")),
    }


def _host(window: MeasuredWindow) -> Figures:
    """The host's CPU load, the run's share of the load and its cost, and the host's memory."""
    hosts, others_percent = window.hosts, window.others_cpu_percent
    busy_percent = mean_of_known(host.cpu_percent for host in hosts)
    cores = last_known(host.cpu_count for host in hosts)
    available_bytes = lowest(host.memory_available_bytes for host in hosts)
    swaps_bytes = [host.swap_used_bytes for host in hosts if host.swap_used_bytes is not None]
    grown_bytes = swaps_bytes[-1] - swaps_bytes[0] if swaps_bytes else None
    lost_ms = None
    # With all cores busy, the training lost the share of the cores that others took.
    if busy_percent is not None and busy_percent >= ALL_CORES_BUSY_PERCENT:
        lost_ms = _known(lambda percent, ms: percent / 100 * ms, others_percent, window.working_ms)
    return {
        "host_cpu_percent": busy_percent,
        "run_cpu_percent": window.own_cpu_percent,
        "others_cpu_percent": others_percent,
        "others_cores": _known(lambda percent, cores: percent / 100 * cores, others_percent, cores or None),
        "memory_available_bytes": available_bytes,
        "memory_available_percent": _percent(available_bytes, last_known(host.memory_total_bytes for host in hosts)),
        "swap_used_bytes": swaps_bytes[-1] if swaps_bytes else None,
        "swap_grown_bytes": grown_bytes,
        "swap_grown_mib": _known(lambda grown: grown / 2**20, grown_bytes),
        "others_cost_ms": lost_ms,
        "others_lost_text": _lost_text(lost_ms),
    }


def _device(window: MeasuredWindow, device: DeviceConditions, fastest_mhz: float | None) -> Figures:
    run, uuid = window.run, device.uuid or ""
    samples, averaged = [sample for _, sample in window.samples.get(uuid, ())], window.averaged(uuid)
    hottest_c = highest(sample.temperature_c for sample in samples)
    limit_c = last_known(slows_down_at_c(sample) for sample in samples)
    links = ("pcie_width", "pcie_width_max", "pcie_generation", "pcie_generation_max")
    link = {name: last_known(getattr(sample, name) for sample in samples) for name in links}
    foreign = [process for process in window.foreign if process.device == device.index]
    memory_bytes = [process.memory_used_bytes for process in foreign if process.memory_used_bytes is not None]
    behind_share = _known(lambda clock, fastest: 1 - clock / fastest, device.sm_clock_mhz, fastest_mhz)
    # Ranks on several GPUs wait for each other in every step.
    meet_on_gpus = run.world_size > 1 and len(run.device_uuids) > 1
    waited_ms = window.working_ms if meet_on_gpus else None
    return {
        "index": device.index,
        "gpu": f"{'' if uuid in run.device_uuids else 'watched '}GPU {device.index}",
        "shared_text": "shared with" if run.device_uuids else "used by",
        "waited_for_text": ": ranks that meet in every step wait for it" if meet_on_gpus else "",
        "used": int(uuid in run.gpu_uuids),
        **_throttling(device, window),
        "temperature_c": hottest_c,
        "slows_down_at_c": limit_c,
        **_heat_texts(hottest_c, limit_c),
        "power_w": mean_of_known(sample.power_w for sample in averaged),
        "power_limit_w": last_known(sample.power_limit_w for sample in samples),
        "clock_loss_percent": _known(lambda share: 100 * share, device.clock_loss_fraction),
        "sm_clock_mhz": device.sm_clock_mhz,
        "fastest_sm_clock_mhz": fastest_mhz,
        "clock_behind_percent": _known(lambda share: 100 * share, behind_share),
        "clock_behind_cost_ms": _known(lambda share, ms: share * ms, behind_share, waited_ms),
        "gpu_utilization_percent": mean_of_known(sample.gpu_utilization_percent for sample in averaged),
        **link,
        "pcie_lanes_missing": _known(lambda now, most: most - now, link["pcie_width"], link["pcie_width_max"]),
        "foreign_processes": len(foreign),
        "foreign_text": _processes_text([process.pid for process in foreign if process.pid is not None]),
        "foreign_memory_bytes": sum(memory_bytes) if memory_bytes else None,
    }


def _throttling(device: DeviceConditions, window: MeasuredWindow) -> Figures:
    """Throttling by cause: milliseconds a step, percent of the time, and the lost part of a step.

    Pauses between steps are as throttled as the steps. A wait for data cannot be lost to a slow clock. Without clocks
    all of the throttled time counts as lost. A run loses nothing to a GPU that it only watches.
    """
    span, step_ms, working_ms = window_of(window.first_rank), window.mean_ms("step"), window.working_ms
    steps_share = None if span is None or step_ms is None else step_ms / span.ms
    trains = device.uuid in window.run.device_uuids
    figures: Figures = {}
    for cause in CAUSES:
        throttled_ms, lost_ms = (
            _known(lambda ms, share: ms * share, times.get(cause.name), steps_share)
            for times in (device.throttled_ms, device.lost_ms)
        )
        lost_ms = None if lost_ms is None else lowest((lost_ms, working_ms))
        cost_ms = lowest((throttled_ms, working_ms)) if lost_ms is None else lost_ms
        figures[f"{cause.name}_ms_per_step"] = throttled_ms
        figures[f"{cause.name}_percent"] = _percent(throttled_ms, step_ms)
        figures[f"{cause.name}_lost_ms_per_step"] = lost_ms
        figures[f"{cause.name}_cost_ms"] = cost_ms if trains else None
        figures[f"{cause.name}_lost_text"] = _lost_text(lost_ms) if trains else "; the run does not use it"
    return figures


def _lost_text(ms: float | None) -> str:
    return "" if ms is None else f": about {figure_text(ms)} ms of the median step lost"


def _processes_text(pids: Sequence[int]) -> str:
    if len(pids) == 1:
        return f"another process (pid {pids[0]})"
    shown = ", ".join(str(pid) for pid in pids[:PIDS_SHOWN])
    return f"{len(pids):,} other processes (pid {shown}{', ...' if len(pids) > PIDS_SHOWN else ''})"


def _heat_texts(hottest_c: float | None, limit_c: float | None) -> dict[str, str]:
    """The temperature beside its limit, and advice about heat; beside a cool chip another part is hot."""
    advice = "cooling: more air, a free slot beside the card, a lower power limit; the clocks come back by themselves"
    if hottest_c is None:
        text = "at an unknown temperature"
    elif limit_c is None:
        text = f"at {hottest_c:.0f} °C"
    else:
        over_c = hottest_c - limit_c
        side, at = "under" if over_c < 0 else "over", "at"
        if over_c <= -FAR_UNDER_C:
            at = "though its chip is at"
            advice = (
                "the chip itself is cool: look at the temperature of the memory, at the regulators beside the chip, and"
                " for an outside signal (a server pulls one when its power supplies or its air are too hot)"
            )
        text = f"{at} {hottest_c:.0f} °C, {abs(over_c):.0f} °C {side} the {limit_c:.0f} °C at which it slows down"
    return {"temperature_text": text, "cooling_advice": advice}


def _ranks(window: MeasuredWindow) -> list[Figures]:
    """The forward of each rank beside the median rank's, over the steps that all have recorded."""
    times_ms = {
        rank: {step.step: step.forward_ms for step in steps if step.forward_ms is not None}
        for rank, steps in window.steps.items()
    }
    common_steps = set.intersection(*map(set, times_ms.values())) if len(times_ms) > 1 else set()
    if not common_steps:
        return []
    means_ms = {rank: statistics.fmean(of_rank[step] for step in common_steps) for rank, of_rank in times_ms.items()}
    # The lower middle: of two ranks the faster one, so that the slow one stands out.
    median_ms = statistics.median_low(means_ms.values())
    slowest_ranks = [max(times_ms, key=lambda rank: times_ms[rank][step]) for step in common_steps]
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
        for rank, forward_ms in means_ms.items()
    ]


WINDOW_NS = 30_000_000_000
DIAGNOSED_STEPS = 200
"""Chosen, not measured: the newest seconds, and the most steps of them, that a live diagnosis looks at."""
MIN_LIVE_STEPS = 10
"""The fewest newest steps that a live diagnosis looks at, however long they took."""
STEADY_EVERY = 5
"""Ticks between two computations of the warm-up, over all kept steps."""


class LiveDiagnosis:
    """The newest `diagnosis` and `steady` state: `add` each rank's steps, and `renew` after each tick."""

    def __init__(self) -> None:
        self.diagnosis: tuple[Diagnosis, ...] = ()
        self.steady = SteadyState()
        self._renewed = 0
        self._steps: dict[int, deque[Step]] = {}

    def add(self, rank: int, steps: Iterable[Step]) -> None:
        """Take steps of a rank; warm-up steps are left out."""
        self._steps.setdefault(rank, deque(maxlen=DIAGNOSED_STEPS)).extend(step for step in steps if not step.warmup)

    def renew(
        self,
        run: RunFile,
        first_rank_steps: Sequence[Step],
        ticks: Sequence[Tick],
        events: Iterable[Event],
        join: StepJoin,
    ) -> None:
        """Diagnose the steps of the last `WINDOW_NS` that `ticks` (oldest first, at least one) cover.

        `first_rank_steps` are all steps of rank 0 that the reader still has: a steady state shows over several windows.
        """
        until_ns = ticks[-1].t_ns
        if self._renewed % STEADY_EVERY == 0:
            measured_steps = [step for step in first_rank_steps if not step.warmup and step.t_ns <= until_ns]
            self.steady = steady_state_of(run, measured_steps, readings_by_device(ticks))
        self._renewed += 1
        steps = {rank: recent for rank, measured in self._steps.items() if (recent := _recent(measured, until_ns))}
        window = window_of(steps[min(steps)]) if steps else None
        if window is None:
            self.diagnosis = ()
            return
        samples = readings_by_device(tick for tick in ticks if tick.t_ns >= window.begin_ns)
        hosts = [(tick.t_ns, tick.host) for tick in ticks]
        self.diagnosis = tuple(diagnose(measured_window_of(run, steps, window, join, samples, hosts, events)))


def _recent(steps: Iterable[Step], until_ns: int) -> list[Step]:
    """The newest of these steps: of one longer than the window, too, the last ones count."""
    covered_steps = [step for step in steps if step.t_ns <= until_ns]
    recent = [step for step in covered_steps if step.t_ns >= covered_steps[-1].t_ns - WINDOW_NS]
    return covered_steps[-max(len(recent), MIN_LIVE_STEPS) :]


def steady_state_of(run: RunFile, measured_steps: Sequence[Step], samples: TimedReadings) -> SteadyState:
    """The warm-up from measured steps and from the temperatures in the timed samples of the watched devices."""
    temperatures = [
        [(t_ns, sample.temperature_c) for t_ns, sample in samples.get(uuid, ()) if sample.temperature_c is not None]
        for uuid in run.watch_uuids
    ]
    return steady_state(measured_steps, temperatures)
