"""The advised parallel strategy: the fastest one measured here, else that of the decision tree in Hugging Face's
multi-GPU guide, on estimated memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from trainfast_runner.machine.devices import Machine
from trainfast_runner.machine.devices_knob import asks_for_cpu
from trainfast_runner.machine.interconnect import Interconnect
from trainfast_runner.memory.model_size import CONTEXT_BYTES, ModelSize, bytes_per_parameter, state_bytes
from trainfast_runner.search.advice.facts import (
    SAME_MEMORY,
    Advice,
    EndedRun,
    Situation,
    global_batch_or_none,
    has_same,
)
from trainfast_runner.settings.knob_type import KnobValues
from trainfast_runner.settings.spec import RunSpec
from trainfast_runner.units import short_gibibytes

ZERO_ONLY_SLOWS = "DeepSpeed only slows a model that already fits with a reasonable batch."
"""A reason that several pieces of advice share."""
FITTING_SHARE = 0.9
"""A model fits if states and context take at most this share of a device's memory."""
SAME_SPEED = (*SAME_MEMORY, "compile", "engine", "workers")
"""Knobs that must be equal for two strategies to be compared by their samples/s."""


def strategy_advice(spec: RunSpec, machine: Machine, situation: Situation) -> Advice:
    """Return the fastest strategy measured here, else the choice of the decision tree on estimated memory."""
    value, reason = _by_decision_tree(spec, machine, situation)
    measured_runs = [
        run
        for run in situation.measured
        if run.state == "finished" and run.samples_per_s and _same_work(run, spec, machine)
    ]
    fastest_run = max(measured_runs, key=lambda run: run.samples_per_s or 0.0, default=None)
    if fastest_run is not None:
        fastest_strategy = str(fastest_run.knobs.get("strategy"))
        compared = {str(run.knobs.get("strategy")) for run in measured_runs}
        if len(compared) > 1:
            guide = "" if fastest_strategy == value else f" Hugging Face's guide would take {value}: {reason}"
            return Advice(
                "strategy",
                f"{fastest_strategy}: the fastest of {_joined_names(sorted(compared))} measured here,"
                f" {fastest_run.samples_per_s:.3g} samples/s ({fastest_run.run_id}).{guide}",
                fastest_strategy,
            )
        if fastest_strategy != value:
            reason += f" Only {fastest_strategy} has been measured here: {fastest_run.samples_per_s:.3g} samples/s."
    return Advice("strategy", f"{value}: {reason}", value)


def _by_decision_tree(spec: RunSpec, machine: Machine, situation: Situation) -> tuple[str, str]:
    """Return the strategy that Hugging Face's decision tree chooses on estimated memory, and the reason."""
    if machine.device == "cpu":
        unused = "without a GPU"
        if asks_for_cpu(spec.knobs["devices"]):
            unused = f"with devices={spec.knobs['devices']}"
        elif machine.nvml_gpus:
            unused = "the GPUs here are hidden, or torch is built without CUDA:"
        return "single", (
            f"{unused} the processes of other strategies share these {machine.cores} cores; ddp with devices=2"
            " shows how one works, not how fast it is."
        )
    usable = [gpu for gpu in machine.gpus if gpu.error is None]
    gpu_bytes = min((gpu.memory_total_bytes for gpu in usable if gpu.memory_total_bytes is not None), default=0)
    size, knobs = situation.size, spec.knobs
    if size is None or not gpu_bytes:
        strategy = "single" if len(usable) < 2 else "ddp"
        return strategy, "the model's size is not known here; this is what suits a model that fits one GPU."
    precision, optimizer = str(knobs["precision"]), str(knobs["optimizer"])

    def needed_bytes(strategy: str) -> int:
        return state_bytes(size, strategy, len(usable), precision, optimizer) + CONTEXT_BYTES

    estimate = (
        f"estimate: {bytes_per_parameter(precision, optimizer)} bytes x {_short_count(size.parameters)} parameters"
        f" = {short_gibibytes(needed_bytes('single') - CONTEXT_BYTES)} of weights, gradients and states,"
        f" of {short_gibibytes(gpu_bytes)} a GPU, activations not counted"
    )
    if len(usable) < 2:
        if needed_bytes("single") <= FITTING_SHARE * gpu_bytes:
            return "single", f"the model fits this GPU ({estimate}). {ZERO_ONLY_SLOWS}"
        return _one_gpu_too_small(needed_bytes, gpu_bytes, estimate)
    if needed_bytes("ddp") <= FITTING_SHARE * gpu_bytes:
        return "ddp", (
            f"the model fits each of {len(usable)} GPUs ({estimate}); ddp exchanges gradients only."
            f" Take zero2 only where it measures faster. {ZERO_ONLY_SLOWS}"
        )
    return _several_gpus_needed(size, needed_bytes, gpu_bytes, estimate, situation.links, len(usable))


def _one_gpu_too_small(needed_bytes: Callable[[str], int], gpu_bytes: int, estimate: str) -> tuple[str, str]:
    lighter = "checkpointing=full, optimizer=adamw-8bit or precision=bf16-pure cost less speed, so try them first"
    for strategy in ("zero2-offload", "zero3-offload"):
        if needed_bytes(strategy) <= FITTING_SHARE * gpu_bytes:
            return strategy, f"the model does not fit this GPU ({estimate}): {lighter}; offloading moves states to RAM."
    return "zero3-offload", f"the model does not fit this GPU ({estimate}): {lighter}; it may need more than one GPU."


def _several_gpus_needed(
    size: ModelSize,
    needed_bytes: Callable[[str], int],
    gpu_bytes: int,
    estimate: str,
    links: Interconnect | None,
    count: int,
) -> tuple[str, str]:
    layer_bytes = 4 * size.largest_layer + CONTEXT_BYTES
    if layer_bytes > FITTING_SHARE * gpu_bytes:
        return "tp", (
            f"not even the largest layer fits one GPU ({short_gibibytes(layer_bytes)} with the context): tp cuts the"
            " layers themselves; else zero3-offload with checkpointing and an 8-bit optimizer."
        )
    if needed_bytes("zero3") > FITTING_SHARE * gpu_bytes:
        return "zero3-offload", f"the model does not fit {count} GPUs together ({estimate}): states have to go to RAM."
    if links is not None and links.all_nvlink:
        return "fsdp", (
            f"the model does not fit one GPU ({estimate}); over NVLink fsdp, zero3, tp and pp are about equal,"
            " and fsdp asks least of the model: measure them."
        )
    if links is not None and links.any_nvlink:
        return "pp", (
            f"the model does not fit one GPU ({estimate}) and NVLink joins only some of them: pp sends the least over"
            " the slow links; tp stays within a group."
        )
    return "pp", f"the model does not fit one GPU ({estimate}) and without NVLink pp beats tp and zero."


def _same_work(run: EndedRun, spec: RunSpec, machine: Machine) -> bool:
    """True if a measured run did this run's work, spread over devices in another way.

    Its batches were as large on every rank, or in total.
    """
    knobs = {**spec.knobs, **cast("KnobValues", {name: run.knobs[name] for name in run.knobs if name in spec.knobs})}
    has_same_batches = all(knobs[name] == spec.knobs[name] for name in ("batch_size", "grad_accum"))
    has_same_global_batch = global_batch_or_none(spec, knobs, machine) == global_batch_or_none(
        spec, spec.knobs, machine
    )
    return has_same(run, spec, SAME_SPEED) and (has_same_batches or has_same_global_batch)


def _joined_names(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _short_count(count: int) -> str:
    return f"{count / 1e9:.2f} G" if count >= 1e9 else f"{count / 1e6:.0f} M" if count >= 1e6 else f"{count:,}"
