"""Advise strategy, learning rate, batch and shapes for a run on this machine, each with its reason.

Nothing here reads a file or asks a device: facts come in as a `Situation`, so advice may be asked for on every change
of a knob. An estimate is called an estimate, and a measurement of this home replaces it.
"""

from __future__ import annotations

from trainfast_runner.machine.cpu.cpu_info import cpu_has_fp16
from trainfast_runner.machine.devices import Machine
from trainfast_runner.search.advice.facts import (
    SAME_MEMORY,
    Advice,
    EndedRun,
    Situation,
    global_batch_or_none,
    has_same,
)
from trainfast_runner.search.advice.strategy import strategy_advice
from trainfast_runner.settings.knob_type import KnobValues, whole_number
from trainfast_runner.settings.precisions import MIXED_PRECISIONS
from trainfast_runner.settings.spec import RunSpec

USEFUL_BATCH = 1024
"""Chosen, not measured: a larger global batch seldom trains better."""
TENSOR_CORE_UNIT, VOCABULARY_UNIT = 8, 64
"""Tensor cores work on multiples of 8; of the vocabulary, a model's longest side, on multiples of 64 (NVIDIA's matrix
multiplication guide)."""
MIN_ALIGNED_BATCH = 5
"""Chosen, not measured: a smaller batch is not advised to grow to `TENSOR_CORE_UNIT`, which would double it or more."""
LONG_SEQUENCE = 1024
"""Chosen, not measured: from this length on the scores of eager attention take much memory."""


def advise(spec: RunSpec, preset_knobs: KnobValues, machine: Machine, situation: Situation) -> tuple[Advice, ...]:
    """Return all advice for this run on this machine: at most one for a knob, and one for the model's shapes."""
    machine = machine.used_by(spec.knobs["devices"])
    possible_advice = (
        strategy_advice(spec, machine, situation),
        lr_advice(spec, preset_knobs, machine),
        precision_advice(spec, machine),
        batch_advice(spec, machine),
        model_advice(situation) if _tensor_cores(spec, machine) else None,
        accumulation_advice(spec, situation),
        sequence_advice(spec, machine),
    )
    return tuple(advice for advice in possible_advice if advice is not None)


def lr_advice(spec: RunSpec, preset_knobs: KnobValues, machine: Machine) -> Advice | None:
    """Advise a rate by the linear rule (Goyal et al. 2017); None if the global batch is the preset's or unknown."""
    batch = global_batch_or_none(spec, spec.knobs, machine)
    preset_batch = global_batch_or_none(spec, preset_knobs, machine)
    rate = preset_knobs["lr"]
    if batch is None or preset_batch is None or batch == preset_batch or not isinstance(rate, float):
        return None
    factor, suggested = batch / preset_batch, float(f"{rate * batch / preset_batch:.3g}")
    if factor > 1:
        text = (
            f"lr={suggested:g}: the global batch is {batch:,}, {factor:.4g} x the preset's {preset_batch:,}, and the"
            f" linear rule makes the rate {factor:.4g} x {rate:g}; 1/{factor:.4g} of the steps see as many samples."
        )
    else:
        text = (
            f"lr={suggested:g}: the global batch is {batch:,} instead of the preset's {preset_batch:,}, and the linear"
            f" rule makes the rate {factor:.3g} x {rate:g}."
        )
    if spec.knobs["strategy"] in ("dp", "ddp"):
        text += (
            " In a script of your own dp divides one batch among the GPUs (the rate stays), ddp gives each its own;"
            " batch_size here is each rank's in both."
        )
    return Advice("lr", text, f"{suggested:g}")


def precision_advice(spec: RunSpec, machine: Machine) -> Advice | None:
    """Advise against fp16 on a CPU without fp16 instructions, where torch emulates fp16 far slower than fp32."""
    if spec.knobs["precision"] != "fp16" or machine.device != "cpu" or cpu_has_fp16():
        return None
    return Advice(
        "precision",
        "bf16: this CPU has no fp16 instructions (AVX512-FP16), and torch emulates them tens of times slower than fp32."
        " A run shows the loss scaling, not a speed.",
        "bf16",
    )


def batch_advice(spec: RunSpec, machine: Machine) -> Advice | None:
    """Advise an aligned batch, and warn of batches too large to be of use."""
    batch, texts, value = whole_number(spec.knobs, "batch_size"), [], None
    global_batch = global_batch_or_none(spec, spec.knobs, machine)
    if _tensor_cores(spec, machine) and batch >= MIN_ALIGNED_BATCH and batch % TENSOR_CORE_UNIT:
        # Downward where possible: a larger batch may not fit.
        value = str(max(TENSOR_CORE_UNIT, batch - batch % TENSOR_CORE_UNIT))
        condition = "" if machine.device == "cuda" else " where it is to train on a GPU"
        texts.append(
            f"{value} instead of {batch}{condition}: tensor cores work on multiples of {TENSOR_CORE_UNIT},"
            " an A100 best on 64."
        )
    if global_batch is not None and global_batch > USEFUL_BATCH:
        texts.append(f"A global batch of {global_batch:,}: over {USEFUL_BATCH:,} it is seldom of use to the model.")
    return Advice("batch_size", " ".join(texts), value) if texts else None


def model_advice(situation: Situation) -> Advice | None:
    """Advise another model, or dimensions that are multiples of 8 (tensor cores) or, for the vocabulary, of 64."""
    if situation.model_refusal is not None:
        return Advice("model", situation.model_refusal)
    hints = []
    for name, length in (situation.shapes or {}).items():
        if name == "vocab_size" and length % VOCABULARY_UNIT:
            hints.append(
                f"model.vocab_size={-(-length // VOCABULARY_UNIT) * VOCABULARY_UNIT} instead of {length}:"
                f" a multiple of {VOCABULARY_UNIT} suits tensor cores, and the added rows are never used."
            )
        elif name != "vocab_size" and length % TENSOR_CORE_UNIT:
            hints.append(
                f"model.{name}={_aligned(length)} instead of {length}:"
                f" a multiple of {TENSOR_CORE_UNIT} suits tensor cores."
            )
    return Advice("model", " ".join(hints)) if hints else None


def accumulation_advice(spec: RunSpec, situation: Situation) -> Advice | None:
    """Advise against accumulation where the batch fits in one piece."""
    batch = whole_number(spec.knobs, "batch_size")
    pieces = whole_number(spec.knobs, "grad_accum")
    if pieces == 1:
        return None
    whole_batch = batch * pieces
    similar_runs = [
        run for run in situation.measured if has_same(run, spec, (*SAME_MEMORY, "strategy", "memory_limit"))
    ]
    fitted_runs = [run for run in similar_runs if run.state == "finished" and _batch(run) >= whole_batch]
    failed_runs = [run for run in similar_runs if run.state == "oom" and batch < _batch(run) <= whole_batch]
    alternative = f"batch_size={whole_batch} with grad_accum=1 is the same global batch"
    if fitted_runs:
        return Advice(
            "grad_accum",
            f"1: {alternative} and fitted here ({fitted_runs[0].run_id}); accumulation only slows it.",
            "1",
        )
    if failed_runs:
        return Advice(
            "grad_accum",
            f"{pieces} is right: batch_size={_batch(failed_runs[0])} did not fit here ({failed_runs[0].run_id}). Prefer"
            " the largest batch that fits and few pieces to small batches and many.",
        )
    return Advice("grad_accum", f"Try 1 first: {alternative}, and where it fits accumulation only slows it.", "1")


def sequence_advice(spec: RunSpec, machine: Machine) -> Advice | None:
    """Advise an aligned sequence, and the attention kernel for a long one."""
    length, texts, value = whole_number(spec.knobs, "seq_len"), [], None
    if length % TENSOR_CORE_UNIT and _tensor_cores(spec, machine):
        value = str(_aligned(length))
        texts.append(f"{value} instead of {length}: tensor cores work on multiples of {TENSOR_CORE_UNIT}, better 64.")
    if length >= LONG_SEQUENCE and spec.knobs["attention"] == "eager":
        texts.append(f"attention=auto: eager keeps scores of {length} x {length} for every head, layer and sample.")
    return Advice("seq_len", " ".join(texts), value) if texts else None


def _tensor_cores(spec: RunSpec, machine: Machine) -> bool:
    """True if the run's shapes may meet tensor cores, so that alignment matters."""
    return machine.device == "cuda" or spec.knobs["precision"] in MIXED_PRECISIONS


def _batch(run: EndedRun) -> int:
    return int(str(run.knobs.get("batch_size") or 0))


def _aligned(length: int) -> int:
    """Return the nearest multiple of `TENSOR_CORE_UNIT`, at least one."""
    return max(TENSOR_CORE_UNIT, round(length / TENSOR_CORE_UNIT) * TENSOR_CORE_UNIT)
