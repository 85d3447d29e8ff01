"""The diagnosis: the rules of `bottleneck_rules` applied to the figures of a window of a run."""

from __future__ import annotations

import statistics
import string
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, TypeVar

from trainfast_runner.errors import highest, last_known, lowest, mean_of_known
from trainfast_runner.machine.telemetry.throttle import CAUSES, slows_down_at_c
from trainfast_runner.records.result import Diagnosis, SteadyState
from trainfast_runner.records.run_file import ForeignProcess, RunFile
from trainfast_runner.records.run_lines import Event, Step
from trainfast_runner.records.tick import HostReading, HostSample, Tick
from trainfast_runner.results.bottleneck_rules import ALL_CORES_BUSY_PERCENT, RULES, BottleneckRule, Figure, Scope
from trainfast_runner.results.device_conditions import DeviceConditions, Reading, StepJoin, Window, window_of
from trainfast_runner.results.distributions import steady_state
from trainfast_runner.settings.spec import strategy_or_single

SEVERITIES = ("warning", "info")
MIN_STEPS_TO_DIAGNOSE = 3
"""Measured steps needed for a diagnosis."""


def diagnose(window: MeasuredWindow) -> list[Diagnosis]:
    """The bottlenecks, the costliest first; one for each rule, of the device or rank with the highest cost."""
    if not has_enough_steps(window):
        return []
    scopes = figures_by_scope(window)
    by_rule: dict[str, Diagnosis] = {}
    for rule in RULES:
        # Rules of one name differ in their advice, the special cases first: the first that holds is the one to follow.
        if rule.name not in by_rule:
            findings = list(filter(None, (_finding(rule, figures) for figures in scopes[rule.scope])))
            if findings:
                by_rule[rule.name] = max(findings, key=partial(_weight, rule))
    return sorted(
        by_rule.values(), key=lambda finding: (SEVERITIES.index(finding.severity), -(finding.cost_ms_per_step or 0.0))
    )


def _weight(rule: BottleneckRule, finding: Diagnosis) -> tuple[float, float]:
    """The sort key of a rule's finding: its cost, then the figure that the rule compares first."""
    first_figure = next((condition.figure for condition in rule.when if condition.operator == ">="), "")
    value = finding.figures.get(first_figure)
    return finding.cost_ms_per_step or 0.0, float(value) if isinstance(value, float | int) else 0.0


def has_enough_steps(window: MeasuredWindow) -> bool:
    """True if the window has enough steps, so that finding nothing means something."""
    return len(window.first_rank) >= MIN_STEPS_TO_DIAGNOSE


class _Sentence(string.Formatter):
    """`str.format` with `figure` as a format, which is `figure_text`."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec != "figure":
            return str(super().format_field(value, format_spec))
        return figure_text(value)


_SENTENCE = _Sentence()


def _finding(rule: BottleneckRule, figures: Mapping[str, Figure]) -> Diagnosis | None:
    """The rule's finding; None unless every condition holds and every figure in its sentences is known."""
    if not rule.holds(figures):
        return None
    if any(figures.get(name) is None for name in (*_fields(rule.line), *_fields(rule.advice))):
        return None
    cost = figures.get(rule.cost) if rule.cost else None
    step_ms = figures["step_ms"]
    cost_ms = float(cost) if isinstance(cost, float | int) else None
    shown = dict.fromkeys([condition.figure for condition in rule.when] + list(rule.shown_figures))
    device, rank = figures.get("index"), figures.get("rank")
    return Diagnosis(
        rule=rule.name,
        line=_SENTENCE.vformat(rule.line, (), figures),
        advice=_SENTENCE.vformat(rule.advice, (), figures),
        severity=rule.severity,
        cost_ms_per_step=cost_ms,
        cost_fraction=cost_ms / step_ms if cost_ms is not None and isinstance(step_ms, float) and step_ms else None,
        figures={name: figures.get(name) for name in shown},
        device=device if rule.scope == "device" and isinstance(device, int) else None,
        rank=rank if rule.scope == "rank" and isinstance(rank, int) else None,
    )


@cache
def _fields(template: str) -> tuple[str, ...]:
    return tuple(name for _, name, _, _ in _SENTENCE.parse(template) if name)


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
            name: value if isinstance(value := knobs.get(name), float | int | str) else None
            for name in ("strategy", "precision", "batch_size", "compile", "p2p")
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
    samples = [sample for _, sample in window.samples.get(device.uuid or "", ())]
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


def _temperature_text(hottest_c: float | None, limit_c: float | None) -> str:
    if hottest_c is None:
        return "at an unknown temperature"
    if limit_c is None:
        return f"at {hottest_c:.0f} °C"
    over_c = hottest_c - limit_c
    at = "though its chip is at" if over_c <= -FAR_UNDER_C else "at"
    side = "under" if over_c < 0 else "over"
    return f"{at} {hottest_c:.0f} °C, {abs(over_c):.0f} °C {side} the {limit_c:.0f} °C at which it slows down"


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
    counts_of_ranks = (
        [step.alloc_retries for step in steps if step.alloc_retries is not None] for steps in window.steps.values()
    )
    return max((counts[-1] - counts[0] for counts in counts_of_ranks if counts), default=None)


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


T = TypeVar("T")

AVERAGED_NS = 1_000_000_000
"""The time that a reading may reach back: the driver averages utilization over 1/6 to 1 s (nvmlUtilization_t in
nvml.h) and power over a second."""


@dataclass(frozen=True)
class MeasuredWindow:
    """Measured steps of a run by rank, and the readings meanwhile: timed samples by UUID, oldest first."""

    run: RunFile
    steps: Mapping[int, Sequence[Step]]
    devices: Sequence[DeviceConditions] = ()
    samples: Mapping[str, Sequence[tuple[int, Reading]]] = field(default_factory=dict)
    hosts: Sequence[HostSample | HostReading] = ()
    foreign: Sequence[ForeignProcess] = ()

    @property
    def first_rank(self) -> Sequence[Step]:
        """The steps of the lowest rank; empty without any."""
        return self.steps[min(self.steps)] if self.steps else ()

    def mean_ms(self, phase: str) -> float | None:
        """Mean time of a phase, or of the whole "step", in ms on the lowest rank; None if no step recorded it."""
        return mean_of_known(getattr(step, f"{phase}_ms") for step in self.first_rank)

    @property
    def working_ms(self) -> float | None:
        """The part of the median step that slow clocks or a shared CPU make longer: a wait for data is its own cause.

        A few very slow steps make the mean longer than the step that is shown, and no cause may cost more than that.
        """
        steps_ms = [step.step_ms - (step.data_ms or 0.0) for step in self.first_rank]
        return statistics.median(steps_ms) if steps_ms else None

    def averaged(self, uuid: str) -> Sequence[Reading]:
        """A device's samples whose utilization and power are the steps' alone; empty in a short window."""
        since_ns = self.first_rank[0].begin_ns + AVERAGED_NS
        return [sample for t_ns, sample in self.samples.get(uuid, ()) if t_ns >= since_ns]


def measured_window_of(
    run: RunFile,
    steps: Mapping[int, Sequence[Step]],
    window: Window,
    join: StepJoin,
    samples: Mapping[str, Sequence[tuple[int, Reading]]],
    hosts: Sequence[tuple[int, HostSample | HostReading]],
    events: Iterable[Event],
) -> MeasuredWindow:
    """The measured `steps` by rank, which take `window`, and the readings meanwhile of timed `samples` and `hosts`."""

    def within(timed: Iterable[tuple[int, T]]) -> list[tuple[int, T]]:
        return [(t_ns, reading) for t_ns, reading in timed if window.begin_ns <= t_ns <= window.end_ns]

    return MeasuredWindow(
        run=run,
        steps=steps,
        devices=join.conditions_between(window.begin_ns, window.end_ns),
        samples={uuid: within(timed) for uuid, timed in samples.items()},
        hosts=[host for _, host in within(hosts)] or _newest_before(hosts, window.begin_ns),
        foreign=foreign_processes(run, events, window),
    )


def _newest_before(
    hosts: Sequence[tuple[int, HostSample | HostReading]], begin_ns: int
) -> list[HostSample | HostReading]:
    """The newest sample before steps too short to have one; it tells the run's share of the CPU from that of others."""
    shared = [host for t_ns, host in hosts if t_ns < begin_ns and host.run and host.run.cpu_percent is not None]
    return shared[-1:]


def foreign_processes(run: RunFile, events: Iterable[Event], window: Window) -> list[ForeignProcess]:
    """Foreign processes that used the run's devices at some time in the window, each once."""
    by_identity: dict[tuple[int, int], ForeignProcess] = {}
    for process in run.foreign_processes:
        if process.device is not None and process.pid is not None:
            by_identity[process.device, process.pid] = process
    for event in events:
        if event.kind != "foreign_process" or event.pid is None or event.device is None:
            continue
        if event.state == "appeared" and event.t_ns <= window.end_ns:
            process = ForeignProcess(device=event.device, pid=event.pid, memory_used_bytes=event.memory_used_bytes)
            by_identity.setdefault((event.device, event.pid), process)
        # A process that left within the window still disturbed its first steps.
        elif event.state == "left" and event.t_ns < window.begin_ns:
            by_identity.pop((event.device, event.pid), None)
    return list(by_identity.values())


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
        self._settle(run, first_rank_steps, ticks)
        until_ns = ticks[-1].t_ns
        steps = {rank: recent for rank, measured in self._steps.items() if (recent := _recent(measured, until_ns))}
        window = window_of(steps[min(steps)]) if steps else None
        if window is None:
            self.diagnosis = ()
            return
        samples = _by_device(tick for tick in ticks if tick.t_ns >= window.begin_ns)
        hosts = [(tick.t_ns, tick.host) for tick in ticks]
        measured_window = measured_window_of(run, steps, window, join, samples, hosts, events)
        self.diagnosis = tuple(diagnose(measured_window))

    def _settle(self, run: RunFile, steps: Sequence[Step], ticks: Sequence[Tick]) -> None:
        """Renew the steady state, once in `STEADY_EVERY` ticks."""
        self._renewed += 1
        if self._renewed % STEADY_EVERY != 1:
            return
        measured_steps = [step for step in steps if not step.warmup and step.t_ns <= ticks[-1].t_ns]
        self.steady = steady_state_of(run, measured_steps, _by_device(ticks))


def steady_state_of(
    run: RunFile, measured_steps: Sequence[Step], samples: Mapping[str, Sequence[tuple[int, Reading]]]
) -> SteadyState:
    """The warm-up from measured steps and from the temperatures in the timed samples of the watched devices."""
    temperatures = [
        [(t_ns, sample.temperature_c) for t_ns, sample in samples.get(uuid, ()) if sample.temperature_c is not None]
        for uuid in run.watch_uuids
    ]
    return steady_state(measured_steps, temperatures)


def _by_device(ticks: Iterable[Tick]) -> dict[str, list[tuple[int, Reading]]]:
    samples: dict[str, list[tuple[int, Reading]]] = {}
    for tick in ticks:
        for device in tick.devices:
            if device.uuid is not None:
                samples.setdefault(device.uuid, []).append((tick.t_ns, device))
    return samples


def _recent(steps: Sequence[Step], until_ns: int) -> list[Step]:
    covered_steps = [step for step in steps if step.t_ns <= until_ns]
    if not covered_steps:
        return []
    # From the newest step and not from now: in a step longer than the window the last ones still count.
    since_ns = covered_steps[-1].t_ns - WINDOW_NS
    return [
        step
        for index, step in enumerate(covered_steps)
        if step.t_ns >= since_ns or index >= len(covered_steps) - MIN_LIVE_STEPS
    ]
