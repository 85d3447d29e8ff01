"""The rules of the diagnosis, as data: each with its figures, thresholds, their source and a cure.

`bottleneck` computes the figures and evaluates all rules the same way. A rule holds when every condition does; an
unknown figure fulfils none. Rules of one name are alternatives: the first that holds is used. Thresholds marked
"chosen" are judgements, set so that a cure is worth more than its trial costs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trainfast_runner.machine.device_events import POWER_SUPPLY_CURE
from trainfast_runner.settings.precisions import PRECISIONS
from trainfast_runner.worker.catalog import STRATEGIES

Figures = dict[str, Any]
"""Numbers and text by name; None is unknown."""
Condition = tuple[str, Literal[">=", "<", "is", "in"], Any]
"""A figure, an operator and a threshold; that of `in` is a tuple."""
Scope = Literal["run", "device", "rank"]

TENSOR_CORE_PRECISIONS = tuple(name for name, precision in PRECISIONS.items() if precision.peak != "fp32")
"""Precisions whose matrix products are computed by tensor cores: every format but plain fp32."""
EXCHANGING_STRATEGIES = tuple(
    name for name, entry in STRATEGIES.items() if not (entry.one_process or entry.is_pipeline or entry.offloads)
)
"""Strategies whose backward exchanges gradients or activations, so that waiting for a link shows in it."""
WHOLE_FORWARD_STRATEGIES = tuple(
    name
    for name, entry in STRATEGIES.items()
    if entry.axes == ("dp",) and not entry.one_process and "weights" not in entry.shards
)
"""Strategies whose forward waits for no other rank: the slowest forward is the slowest rank."""
BUSY_STRATEGIES = (*(name for name, entry in STRATEGIES.items() if entry.one_device), *EXCHANGING_STRATEGIES)
"""Strategies whose GPUs all have work all the time; with the others a GPU waits for its turn, or for the CPU that
updates the weights."""

OTHERS_CPU_PERCENT = 15
"""Share of the CPU, all cores together, from which other processes make a CPU run short of it."""
ALL_CORES_BUSY_PERCENT = 90
"""Chosen, not measured: CPU percent from which a thread that wants to run has to wait for a core."""


OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<": operator.lt,
    "is": operator.eq,
    "in": lambda value, allowed: value in allowed,
}


@dataclass(frozen=True)
class BottleneckRule:
    """One possible bottleneck."""

    name: str
    title: str
    when: tuple[Condition, ...]
    line: str
    """A format string over figures; `figure` as a format is three significant digits. `advice` likewise."""
    advice: str
    source: str
    scope: Scope = "run"
    severity: Literal["warning", "info"] = "warning"
    cost: str = ""
    """The figure with its milliseconds of each step; empty when not measured."""
    shown_figures: tuple[str, ...] = ()
    """Figures that are shown beside those of `when`."""

    def holds(self, figures: Figures) -> bool:
        """True if the figures fulfil every condition; an unknown one never does."""
        for figure, operator_name, threshold in self.when:
            value = figures.get(figure)
            # A damaged record may have a text for a number.
            is_comparable = isinstance(value, int | float) or operator_name in ("is", "in")
            if value is None or not is_comparable or not OPERATORS[operator_name](value, threshold):
                return False
        return True


def _data_bound(advice: str, *conditions: Condition) -> BottleneckRule:
    """The rule about waiting for data, with the advice for further conditions."""
    return BottleneckRule(
        "data-bound",
        "data-bound",
        when=(("data_percent", ">=", 10), *conditions),
        line="waiting for data: {data_ms:figure} of each {step_ms:figure} ms step ({data_percent:.0f} %)",
        advice=advice,
        source="chosen: under a tenth of the step the gain is smaller than what batch_size or precision give. The wait"
        " is measured around fetching the next batch, summed over the steps, because loaders stall in bursts.",
        cost="data_ms",
        shown_figures=("data_ms", "step_ms", "workers", "cores", "steps"),
    )


_TWO_PERCENT = "chosen: two runs of the same settings differ by 2 %; the reasons and counters are nvml.h's."

RULES: tuple[BottleneckRule, ...] = (
    BottleneckRule(
        "memory-thrashing",
        "memory thrashing",
        when=(("alloc_retries", ">=", 1),),
        line="memory is so full that the allocator flushed its cache and tried again ({alloc_retries} x in {steps}"
        " steps)",
        advice="{allocator_advice}a smaller batch_size with more grad_accum, or checkpointing=full: it fits, but each"
        " retry stalls the device",
        source="PyTorch, torch.cuda.memory_stats: num_alloc_retries counts failed cudaMalloc calls that ended in a"
        " cache flush and a retry; freeing and mapping memory again synchronizes the device, so one is too many.",
        shown_figures=("steps", "peak_reserved_bytes", "unallocated_percent"),
    ),
    _data_bound(
        "workers={more_workers}: loading now happens in the training process, between its steps", ("workers", "is", 0)
    ),
    _data_bound("workers={more_workers}: {workers} loader processes do not keep up", ("spare_cores", ">=", 1)),
    _data_bound(
        "cheaper loading (images resized once, text tokenized ahead) or faster storage: more than {workers} loader"
        " processes do not help on {cores} cores"
    ),
    # Used where the number of workers or cores is unknown.
    _data_bound(
        "cheaper loading (images resized once, text tokenized ahead), faster storage, or more loader processes"
    ),
    BottleneckRule(
        "thermal",
        "throttled by heat",
        scope="device",
        when=(("thermal_percent", ">=", 2),),
        line="{gpu} is throttled by heat for {thermal_ms_per_step:figure} of each {step_ms:figure} ms step,"
        " {temperature_text}{thermal_lost_text}",
        advice="{cooling_advice}",
        source=_TWO_PERCENT + " SW thermal slowdown may also come from hot memory.",
        cost="thermal_cost_ms",
        shown_figures=(
            *("thermal_ms_per_step", "thermal_lost_ms_per_step", "step_ms"),
            *("temperature_c", "slows_down_at_c", "clock_loss_percent"),
        ),
    ),
    BottleneckRule(
        "power-brake",
        "held by the power brake",
        scope="device",
        when=(("brake_percent", ">=", 2),),
        line="{gpu} is braked by the power supply for {brake_ms_per_step:figure} of each {step_ms:figure} ms step"
        "{brake_lost_text}",
        advice=POWER_SUPPLY_CURE,
        source=_TWO_PERCENT + " The brake halves the clocks or more (HW Power Brake Slowdown, nvml.h).",
        cost="brake_cost_ms",
        shown_figures=("brake_ms_per_step", "step_ms", "power_w", "power_limit_w", "clock_loss_percent"),
    ),
    BottleneckRule(
        "power-capped",
        "at the power limit",
        scope="device",
        when=(("power_percent", ">=", 10), ("clock_loss_percent", ">=", 5)),
        line="{gpu} is at its power limit for {power_percent:.0f} % of the time, its clock {clock_loss_percent:.0f} %"
        " under the maximum",
        advice="a higher power limit where the card and its cooling allow it; otherwise this is the card's limit",
        source="chosen: the SW power cap is normal at full load on cards bound by their power, so it is information,"
        " and only with a clock that is really lower.",
        severity="info",
        cost="power_cost_ms",
        shown_figures=("power_ms_per_step", "power_lost_ms_per_step", "power_w", "power_limit_w"),
    ),
    BottleneckRule(
        "sync-boost",
        "held by its sync-boost group",
        scope="device",
        when=(("sync_boost_percent", ">=", 2),),
        line="{gpu} is held to the clocks of its sync-boost group for {sync_boost_percent:.0f} % of the time",
        advice="take the GPUs out of the sync-boost group, or find the slowest of them",
        source=_TWO_PERCENT,
        severity="info",
        cost="sync_boost_cost_ms",
        shown_figures=("sync_boost_ms_per_step", "clock_loss_percent"),
    ),
    BottleneckRule(
        "foreign-process",
        "another process on the GPU",
        scope="device",
        when=(("used", "is", 1), ("foreign_processes", ">=", 1)),
        line="{gpu} is {shared_text} {foreign_text}",
        advice="end them, or train on another GPU (the devices knob): figures of a shared GPU compare with nothing",
        source="chosen: one is enough, kernels of two processes take turns on the device.",
        shown_figures=("foreign_memory_bytes",),
    ),
    BottleneckRule(
        "straggler-rank",
        "a slow rank",
        scope="rank",
        when=(
            ("strategy", "in", WHOLE_FORWARD_STRATEGIES),
            ("behind_percent", ">=", 10),
            ("slowest_percent", ">=", 75),
            ("steps", ">=", 5),
        ),
        line="rank {rank} is the slowest: its forward takes {forward_ms:figure} ms where the ranks' median is"
        " {median_forward_ms:figure} ms, and the others wait for it",
        advice="look at that rank's device: its clock, its temperature, its PCIe link, who else uses it",
        source="chosen: equal ranks scatter by less than a tenth, and a rank that is slow for a reason is so in most"
        " steps. The forward of these strategies waits for no other rank, so its length is the rank's own.",
        cost="behind_ms",
        shown_figures=("forward_ms", "median_forward_ms", "behind_ms", "world_size"),
    ),
    BottleneckRule(
        "straggler-gpu",
        "a slow GPU",
        scope="device",
        when=(("used", "is", 1), ("clock_behind_percent", ">=", 5), ("gpu_utilization_percent", ">=", 20)),
        line="{gpu} runs at {sm_clock_mhz:.0f} MHz, the fastest of this run at {fastest_sm_clock_mhz:.0f} MHz"
        "{waited_for_text}",
        advice="its temperature, power limit and application clocks, or leave it out with devices",
        source="chosen: ranks meet once a step, so the lowest clock sets the pace; boost clocks scatter by"
        " less than 5 %.",
        cost="clock_behind_cost_ms",
        shown_figures=("sm_clock_mhz", "fastest_sm_clock_mhz", "temperature_c", "power_limit_w"),
    ),
    BottleneckRule(
        "communication-bound",
        "communication-bound",
        when=(("world_size", ">=", 2), ("strategy", "in", EXCHANGING_STRATEGIES), ("exposed_percent", ">=", 15)),
        line="exchanging between {world_size} ranks takes about {exposed_ms:figure} of each {step_ms:figure} ms step:"
        " the backward is {backward_over_forward:.1f} times the forward",
        advice="grad_accum={more_accum} exchanges half as often; {link_advice}",
        source="a backward computes twice what a forward does (Kaplan et al., Scaling Laws for Neural Language Models,"
        " 2020, section 2.1), and what checkpointing computes again; what is over that is waiting for the link. The"
        " 15 % is chosen.",
        cost="exposed_ms",
        shown_figures=("forward_ms", "backward_ms", "computed_backward_ms", "exposed_ms", "link", "p2p"),
    ),
    BottleneckRule(
        "launch-bound",
        "launch-bound",
        when=(
            ("device", "is", "cuda"),
            ("strategy", "in", BUSY_STRATEGIES),
            ("unexplained_idle_percent", ">=", 15),
            ("data_percent", "<", 10),
        ),
        line="the GPU is idle for {gpu_idle_percent:.0f} % of the time although its data is ready: kernels are shorter"
        " than the CPU takes to launch them",
        advice="a larger batch_size, compile=blocks (which compiles in a fraction of default's time) or"
        " compile=reduce-overhead (CUDA graphs), optimizer=adamw-fused, attention=auto: fewer and longer kernels",
        source="utilization is the share of time in which any kernel ran (nvmlDeviceGetUtilizationRates); each launch"
        " costs the CPU microseconds (NVIDIA, CUDA Graph Best Practice for PyTorch). The 15 % is chosen.",
        cost="unexplained_idle_ms",
        shown_figures=("gpu_utilization_percent", "data_percent", "batch_size", "step_ms", "compile"),
    ),
    BottleneckRule(
        "small-batch",
        "too small a batch for tensor cores",
        when=(
            ("device", "is", "cuda"),
            ("precision", "in", TENSOR_CORE_PRECISIONS),
            ("tokens_per_micro_batch", "<", 300),
        ),
        line="a micro-batch of {tokens_per_micro_batch:.0f} tokens is too small for tensor cores: reading the weights"
        " takes longer than multiplying by them",
        advice="a larger batch_size (with less grad_accum the global batch stays), in multiples of 8",
        source="a product with M rows does about M operations a byte of 16-bit weights (NVIDIA, Matrix Multiplication"
        " Background User's Guide); an H100 SXM needs 989 TFLOP/s / 3.35 TB/s = 295 a byte.",
        shown_figures=("batch_size", "tokens_per_micro_batch", "gpu_utilization_percent"),
    ),
    BottleneckRule(
        "pcie-width",
        "PCIe below its width",
        scope="device",
        when=(("used", "is", 1), ("pcie_lanes_missing", ">=", 1), ("gpu_utilization_percent", ">=", 20)),
        line="{gpu} has {pcie_width} of its {pcie_width_max} PCIe lanes",
        advice="reseat the card or its riser, another slot, the slot's setting in the firmware; it matters most for"
        " offload and several GPUs without NVLink",
        source="nvmlDeviceGetCurrPcieLinkWidth against the maximum, under load only: an idle link may narrow by"
        " itself.",
        severity="info",
        shown_figures=("pcie_width", "pcie_width_max", "pcie_generation", "pcie_generation_max"),
    ),
    BottleneckRule(
        "host-cpu",
        "host CPU short",
        when=(("device", "is", "cpu"), ("others_cpu_percent", ">=", OTHERS_CPU_PERCENT)),
        line="other processes take {others_cpu_percent:.0f} % of the CPU that trains{others_lost_text}",
        advice="end them or wait: the CPU is this run's device",
        source="chosen: host use less the run's own process tree, as a share of all cores. With all of them busy the"
        " training lacks that share: a process that used 5 % of one core slowed a two-core training by about 2 % here.",
        cost="others_cost_ms",
        shown_figures=("host_cpu_percent", "run_cpu_percent", "cores"),
    ),
    BottleneckRule(
        "host-cpu",
        "host CPU short",
        when=(("device", "is", "cuda"), ("host_cpu_percent", ">=", ALL_CORES_BUSY_PERCENT)),
        line="the host's {cores} cores are {host_cpu_percent:.0f} % busy: loading and launching wait for one",
        advice="fewer workers, cheaper loading, or end other programs",
        source="chosen: over 90 % a thread that wants to run has to wait for a core.",
        shown_figures=("host_cpu_percent", "run_cpu_percent", "workers", "cores"),
    ),
    BottleneckRule(
        "spinning-threads",
        "threads spin on a busy CPU",
        when=(("wait_policy", "is", "default"), ("others_cores", ">=", 0.25)),
        line="the run's threads spin while they wait for each other, and other processes now use"
        " {others_cores:figure} of {cores} cores",
        advice="{sleep_advice}; or end them",
        source="chosen: a spinning thread keeps the core that the thread it waits for needs. Beside one busy core of"
        " two, tiny-llama made 1.5 samples/s with spinning threads and 21.7 with sleeping ones.",
        shown_figures=("wait_policy", "others_cores", "cores", "host_cpu_percent", "run_cpu_percent"),
    ),
    BottleneckRule(
        "host-memory",
        "host memory short",
        when=(("memory_available_percent", "<", 5),),
        line="only {memory_available_percent:.1f} % of the host's memory is left",
        advice="fewer workers, a smaller batch on a CPU run, no offload; otherwise the kernel will kill a process",
        source="chosen: MemAvailable is the kernel's own estimate of what can be allocated without swapping (proc(5)).",
        shown_figures=("memory_available_bytes", "swap_used_bytes"),
    ),
    BottleneckRule(
        "host-memory",
        "host memory short",
        when=(("swap_grown_bytes", ">=", 64 << 20),),
        line="the host swaps: {swap_grown_mib:.0f} MiB more than when these steps began",
        advice="fewer workers, a smaller batch on a CPU run, no offload: a page that comes back from disk stalls its"
        " step",
        source="chosen: less than 64 MiB may be old pages of idle programs.",
        shown_figures=("memory_available_bytes", "swap_used_bytes"),
    ),
)
"""Every rule. Of the rules that hold, warnings come first, then the highest cost of a step; rules of unknown cost last,
in this order."""


def matching_rule(name: str, figures: Figures) -> BottleneckRule | None:
    """The first rule of this name whose conditions the figures fulfil; None for a rule of another version."""
    return next((rule for rule in RULES if rule.name == name and rule.holds(figures)), None)
