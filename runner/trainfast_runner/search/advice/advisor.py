"""The guides' decisions as code: strategy, learning rate and shapes, each with its reason.

Nothing here reads a file or asks a device: facts come in as a `Situation`, so advice may be asked for on every turn of
a knob. An estimate is called an estimate, and a measurement of this home goes before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import cast

from trainfast_runner.errors import UserError
from trainfast_runner.machine.cpu.device_names import asks_for_cpu
from trainfast_runner.machine.devices import Machine, cpu_has_fp16
from trainfast_runner.machine.interconnect import Interconnect
from trainfast_runner.memory.model_size import (
    CONTEXT_BYTES,
    MIXED,
    ModelSize,
    bytes_per_parameter,
    state_bytes,
)
from trainfast_runner.settings.knob_type import KnobValues, whole_number
from trainfast_runner.settings.spec import RunSpec
from trainfast_runner.settings.world import device_count, global_batch
from trainfast_runner.units import gibibytes

ZERO_ONLY_SLOWS = "DeepSpeed only slows a model that already fits with a reasonable batch."
USEFUL_BATCH = 1024
FITTING_SHARE = 0.9
"""Share of a device's memory that states and context of a model that fits may take."""
GIB = 2**30
SAME_MEMORY = ("precision", "seq_len", "checkpointing", "optimizer", "attention")
"""Knobs that must be equal for two runs to need the same memory a sample."""
SAME_SPEED = (*SAME_MEMORY, "compile", "engine", "workers")
"""Knobs that must be equal for two strategies to be compared by their samples/s."""


@dataclass(frozen=True)
class Measured:
    """One ended run of the same preset, model and data in this home, whatever its knobs.

    `samples_per_s` is summed over data-parallel ranks; None if unknown, or if the speed must not rank.
    """

    run_id: str
    knobs: Mapping[str, object]
    state: str
    samples_per_s: float | None


@dataclass(frozen=True)
class Situation:
    """Facts about model and machine beside the knobs; None when unknown."""

    size: ModelSize | None = None
    shapes: Mapping[str, int] | None = None
    """Hidden and vocabulary size under the names the configuration gives them."""
    links: Interconnect | None = None
    measured: tuple[Measured, ...] = ()


@dataclass(frozen=True)
class Advice:
    """One paragraph about a knob, and the advised value as it is typed; None for advice without a value."""

    knob: str
    text: str
    value: str | None = None


def advise(spec: RunSpec, preset_knobs: KnobValues, machine: Machine, situation: Situation) -> tuple[Advice, ...]:
    """All advice for this run on this machine, at most one for each knob and one for the model's shapes."""
    machine = machine.used_by(spec.knobs["devices"])
    found = (
        strategy_advice(spec, machine, situation),
        lr_advice(spec, preset_knobs, machine),
        precision_advice(spec, machine),
        batch_advice(spec, machine),
        model_advice(situation) if _tensor_cores(spec, machine) else None,
        accumulation_advice(spec, situation),
        sequence_advice(spec, machine),
    )
    return tuple(advice for advice in found if advice is not None)


def strategy_advice(spec: RunSpec, machine: Machine, situation: Situation) -> Advice:
    """The fastest strategy measured here, else the one of the guides' decision tree on estimated memory."""
    value, why = _from_the_tree(spec, machine, situation)
    measured = [run for run in situation.measured if _same_work(run, spec, machine)]
    best = _fastest(measured)
    if best is not None:
        fastest = str(best.knobs.get("strategy"))
        compared = {str(run.knobs.get("strategy")) for run in measured if run.samples_per_s}
        if len(compared) > 1:
            return Advice(
                "strategy",
                f"{fastest}: the fastest of {_listed(sorted(compared))} measured here,"
                f" {best.samples_per_s:.3g} samples/s ({best.run_id}). {why}",
                fastest,
            )
        if fastest != value:
            why += f" Only {fastest} has been measured here: {best.samples_per_s:.3g} samples/s."
    return Advice("strategy", f"{value}: {why}", value)


def _from_the_tree(spec: RunSpec, machine: Machine, situation: Situation) -> tuple[str, str]:
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
    memory = min((gpu.memory_total_bytes for gpu in usable if gpu.memory_total_bytes is not None), default=0)
    size, knobs = situation.size, spec.knobs
    if size is None or not memory:
        what = "single" if len(usable) < 2 else "ddp"
        return what, "the model's size is not known here; this is what suits a model that fits one GPU."
    precision, optimizer = str(knobs["precision"]), str(knobs["optimizer"])

    def needs(strategy: str) -> int:
        return state_bytes(size, strategy, len(usable), precision, optimizer) + CONTEXT_BYTES

    estimate = (
        f"estimate: {bytes_per_parameter(precision, optimizer)} bytes x {_short(size.parameters)} parameters"
        f" = {_gib(needs('single') - CONTEXT_BYTES)} of weights, gradients and states, of {_gib(memory)} a GPU,"
        " activations not counted"
    )
    if len(usable) < 2:
        if needs("single") <= FITTING_SHARE * memory:
            return "single", f"the model fits this GPU ({estimate}). {ZERO_ONLY_SLOWS}"
        return _one_gpu_too_small(needs, memory, estimate)
    if needs("ddp") <= FITTING_SHARE * memory:
        return "ddp", (
            f"the model fits each of {len(usable)} GPUs ({estimate}); ddp exchanges gradients only."
            f" Take zero2 only where it measures faster. {ZERO_ONLY_SLOWS}"
        )
    return _several_gpus_needed(size, needs, memory, estimate, situation.links, len(usable))


def _one_gpu_too_small(needs: Callable[[str], int], memory: int, estimate: str) -> tuple[str, str]:
    lighter = "checkpointing=full, optimizer=adamw-8bit or precision=bf16-pure cost less speed, so try them first"
    for strategy in ("zero2-offload", "zero3-offload"):
        if needs(strategy) <= FITTING_SHARE * memory:
            return strategy, f"the model does not fit this GPU ({estimate}): {lighter}; offloading moves states to RAM."
    return "zero3-offload", f"the model does not fit this GPU ({estimate}): {lighter}; it may need more than one GPU."


def _several_gpus_needed(
    size: ModelSize, needs: Callable[[str], int], memory: int, estimate: str, links: Interconnect | None, count: int
) -> tuple[str, str]:
    largest = 4 * size.largest_layer + CONTEXT_BYTES
    if largest > FITTING_SHARE * memory:
        return "tp", (
            f"not even the largest layer fits one GPU ({_gib(largest)} with the context): tp cuts the layers"
            " themselves; else zero3-offload with checkpointing and an 8-bit optimizer."
        )
    if needs("zero3") > FITTING_SHARE * memory:
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


def lr_advice(spec: RunSpec, preset_knobs: KnobValues, machine: Machine) -> Advice | None:
    """The linear rule (Goyal et al. 2017) whenever the global batch is not the preset's."""
    now, before = _global_batch(spec, spec.knobs, machine), _global_batch(spec, preset_knobs, machine)
    rate = preset_knobs["lr"]
    if now is None or before is None or now == before or not isinstance(rate, float):
        return None
    factor, suggested = now / before, float(f"{rate * now / before:.3g}")
    text = (
        f"lr={suggested:g}: the global batch is {now:,}, {factor:.4g} x the preset's {before:,}, and the linear rule"
        f" makes the rate {factor:.4g} x {rate:g}; 1/{factor:.4g} of the steps see as many samples."
        if factor > 1
        else f"lr={suggested:g}: the global batch is {now:,} instead of the preset's {before:,}, and the linear rule"
        f" makes the rate {factor:.3g} x {rate:g}."
    )
    if spec.knobs["strategy"] in ("dp", "ddp"):
        text += (
            " In a script of your own dp divides one batch among the GPUs (the rate stays), ddp gives each its own;"
            " batch_size here is each rank's in both."
        )
    return Advice("lr", text, f"{suggested:g}")


def precision_advice(spec: RunSpec, machine: Machine) -> Advice | None:
    """fp16 on a CPU without fp16 instructions: torch emulates it tens of times slower than fp32."""
    if spec.knobs["precision"] != "fp16" or machine.device != "cpu" or cpu_has_fp16():
        return None
    return Advice(
        "precision",
        "bf16: this CPU has no fp16 instructions (AVX512-FP16), and torch emulates them tens of times slower than fp32."
        " A run shows the loss scaling, not a speed.",
        "bf16",
    )


def batch_advice(spec: RunSpec, machine: Machine) -> Advice | None:
    """Alignment of the batch, and a warning of batches too large to be of use."""
    batch, texts, value = whole_number(spec.knobs, "batch_size"), [], None
    total = _global_batch(spec, spec.knobs, machine)
    if _tensor_cores(spec, machine) and batch > 4 and batch % 8:
        # Downward where possible: a larger batch may not fit.
        value = str(max(8, batch - batch % 8))
        where = "" if machine.device == "cuda" else " where it is to train on a GPU"
        texts.append(f"{value} instead of {batch}{where}: tensor cores work on multiples of 8, an A100 best on 64.")
    if total is not None and total > USEFUL_BATCH:
        texts.append(f"A global batch of {total:,}: over {USEFUL_BATCH:,} it is seldom of use to the model.")
    return Advice("batch_size", " ".join(texts), value) if texts else None


def model_advice(situation: Situation) -> Advice | None:
    """Model dimensions that are no multiple of 8 (tensor cores) or, for the vocabulary, of 64."""
    hints = []
    for name, length in (situation.shapes or {}).items():
        if name == "vocab_size" and length % 64:
            hints.append(
                f"model.vocab_size={-(-length // 64) * 64} instead of {length}: a multiple of 64 suits tensor cores,"
                " and the added rows are never used."
            )
        elif name != "vocab_size" and length % 8:
            hints.append(f"model.{name}={_aligned(length, 8)} instead of {length}: a multiple of 8 suits tensor cores.")
    return Advice("model", " ".join(hints)) if hints else None


def accumulation_advice(spec: RunSpec, situation: Situation) -> Advice | None:
    """Accumulation is of no use where the batch fits in one piece."""
    batch, pieces = whole_number(spec.knobs, "batch_size"), whole_number(spec.knobs, "grad_accum")
    if pieces == 1:
        return None
    whole = batch * pieces
    alike = [run for run in situation.measured if _same(run, spec, (*SAME_MEMORY, "strategy", "memory_limit"))]
    fitted = [run for run in alike if run.state == "finished" and _batch(run) >= whole]
    failed = [run for run in alike if run.state == "oom" and batch < _batch(run) <= whole]
    instead = f"batch_size={whole} with grad_accum=1 is the same global batch"
    if fitted:
        return Advice(
            "grad_accum", f"1: {instead} and fitted here ({fitted[0].run_id}); accumulation only slows it.", "1"
        )
    if failed:
        return Advice(
            "grad_accum",
            f"{pieces} is right: batch_size={_batch(failed[0])} did not fit here ({failed[0].run_id}). Prefer the"
            " largest batch that fits and few pieces to small batches and many.",
        )
    return Advice("grad_accum", f"Try 1 first: {instead}, and where it fits accumulation only slows it.", "1")


def sequence_advice(spec: RunSpec, machine: Machine) -> Advice | None:
    """Alignment of the sequence, and the attention kernel for long ones."""
    length, texts, value = whole_number(spec.knobs, "seq_len"), [], None
    if length % 8 and _tensor_cores(spec, machine):
        value = str(_aligned(length, 8))
        texts.append(f"{value} instead of {length}: tensor cores work on multiples of 8, better 64.")
    if length >= 1024 and spec.knobs["attention"] == "eager":
        texts.append(f"attention=auto: eager keeps scores of {length} x {length} for every head, layer and sample.")
    return Advice("seq_len", " ".join(texts), value) if texts else None


def _tensor_cores(spec: RunSpec, machine: Machine) -> bool:
    """True if the run's shapes may meet tensor cores, so that alignment matters."""
    return machine.device == "cuda" or spec.knobs["precision"] in MIXED


def _global_batch(spec: RunSpec, knobs: KnobValues, machine: Machine) -> int | None:
    """Samples a step with these knobs; None when there are not as many devices."""
    try:
        return global_batch(knobs, device_count(replace(spec, knobs=knobs), machine))
    except UserError:
        return None


def _same(run: Measured, spec: RunSpec, names: tuple[str, ...]) -> bool:
    """True if a measured run had this run's values of some knobs; a knob that its record lacks counts as equal."""
    return all(run.knobs.get(name, spec.knobs[name]) == spec.knobs[name] for name in names)


def _same_work(run: Measured, spec: RunSpec, machine: Machine) -> bool:
    """True if a measured run did this run's work, spread over devices in another way.

    Its batches were as large on every rank, or in total.
    """
    knobs = {**spec.knobs, **cast("KnobValues", {name: run.knobs[name] for name in run.knobs if name in spec.knobs})}
    same_rank = all(knobs[name] == spec.knobs[name] for name in ("batch_size", "grad_accum"))
    same_total = _global_batch(spec, knobs, machine) == _global_batch(spec, spec.knobs, machine)
    return _same(run, spec, SAME_SPEED) and (same_rank or same_total)


def _fastest(measured: Iterable[Measured]) -> Measured | None:
    finished = [run for run in measured if run.samples_per_s and run.state == "finished"]
    return max(finished, key=lambda run: run.samples_per_s or 0.0, default=None)


def _batch(run: Measured) -> int:
    return int(str(run.knobs.get("batch_size") or 0))


def _aligned(value: int, multiple: int) -> int:
    """The nearest multiple, at least one."""
    return max(multiple, round(value / multiple) * multiple)


def _listed(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _short(count: int) -> str:
    return f"{count / 1e9:.2f} G" if count >= 1e9 else f"{count / 1e6:.0f} M" if count >= 1e6 else f"{count:,}"


def _gib(size_bytes: int) -> str:
    # The short form writes a thousand and more with an exponent.
    return gibibytes(size_bytes) if size_bytes >= 1000 * GIB else f"{size_bytes / GIB:.3g} GiB"
