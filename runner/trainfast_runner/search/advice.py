"""Advice by Hugging Face's performance guides ("Performance and Scalability" and its multi-GPU part): the knob to turn
next, with the reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from trainfast_runner.errors import UserError
from trainfast_runner.machine import warm_python
from trainfast_runner.machine.cpu import cpu_has_fp16
from trainfast_runner.machine.devices import Machine
from trainfast_runner.machine.telemetry.topology import Interconnect, read_links_among
from trainfast_runner.memory.headroom import CONTEXT_BYTES, ModelSize, bytes_per_parameter, model_size, state_bytes
from trainfast_runner.settings.device_counts import device_count, global_batch
from trainfast_runner.settings.knob_values import KnobValues, whole_number
from trainfast_runner.settings.precisions import MIXED_PRECISIONS
from trainfast_runner.settings.spec import RunSpec
from trainfast_runner.units import short_gibibytes

USEFUL_BATCH = 1024
"""Chosen, not measured: a larger global batch seldom trains better."""
TENSOR_CORE_UNIT, VOCABULARY_UNIT = 8, 64
"""Tensor cores work on multiples of 8; of the vocabulary, a model's longest side, on multiples of 64 (NVIDIA's matrix
multiplication guide)."""
MIN_ALIGNED_BATCH = 5
"""Chosen, not measured: a smaller batch is not advised to grow to `TENSOR_CORE_UNIT`, which would double it or more."""
LONG_SEQUENCE = 1024
"""Chosen, not measured: from this length on the scores of eager attention take much memory."""


def advise(spec: RunSpec, preset_knobs: KnobValues, machine: Machine, situation: Situation) -> Iterator[Advice]:
    """Yield all advice for this run on this machine: at most one for a knob, and one for the model's shapes."""
    knobs, machine = spec.knobs, machine.used_by(spec.knobs["devices"])
    batch, pieces, length = (whole_number(knobs, name) for name in ("batch_size", "grad_accum", "seq_len"))
    global_batch, preset_batch = (_global_batch_or_none(spec, each, machine) for each in (knobs, preset_knobs))
    # The run's shapes may meet tensor cores, so that alignment matters.
    has_tensor_cores = machine.device == "cuda" or knobs["precision"] in MIXED_PRECISIONS
    value, reason = _by_decision_tree(spec, machine, situation)
    yield Advice("strategy", f"{value}: {reason}", value)
    rate = preset_knobs["lr"]
    if global_batch and preset_batch and global_batch != preset_batch and isinstance(rate, float):
        yield _lr_advice(rate, global_batch, preset_batch, knobs["strategy"])
    if knobs["precision"] == "fp16" and machine.device == "cpu" and not cpu_has_fp16():
        text = (
            "bf16: this CPU has no fp16 instructions (AVX512-FP16), and torch emulates them tens of times slower than"
            " fp32. A run shows the loss scaling, not a speed."
        )
        yield Advice("precision", text, "bf16")
    texts, advised = [], None
    if has_tensor_cores and batch >= MIN_ALIGNED_BATCH and batch % TENSOR_CORE_UNIT:
        # Downward where possible: a larger batch may not fit.
        advised = str(max(TENSOR_CORE_UNIT, batch - batch % TENSOR_CORE_UNIT))
        condition = "" if machine.device == "cuda" else " where it is to train on a GPU"
        texts.append(
            f"{advised} instead of {batch}{condition}: tensor cores work on multiples of {TENSOR_CORE_UNIT},"
            " an A100 best on 64."
        )
    if global_batch is not None and global_batch > USEFUL_BATCH:
        texts.append(f"A global batch of {global_batch:,}: over {USEFUL_BATCH:,} it is seldom of use to the model.")
    if texts:
        yield Advice("batch_size", " ".join(texts), advised)
    if has_tensor_cores and (advice := model_advice(situation)) is not None:
        yield advice
    if pieces > 1:
        alternative = f"batch_size={batch * pieces} with grad_accum=1 is the same global batch"
        text = f"Try 1 first: {alternative}, and where it fits accumulation only slows it."
        yield Advice("grad_accum", text, "1")
    texts, advised = [], None
    if length % TENSOR_CORE_UNIT and has_tensor_cores:
        advised = str(_aligned(length))
        texts.append(f"{advised} instead of {length}: tensor cores work on multiples of {TENSOR_CORE_UNIT}, better 64.")
    if length >= LONG_SEQUENCE and knobs["attention"] == "eager":
        texts.append(f"attention=auto: eager keeps scores of {length} x {length} for every head, layer and sample.")
    if texts:
        yield Advice("seq_len", " ".join(texts), advised)


def _lr_advice(rate: float, batch: int, preset_batch: int, strategy: object) -> Advice:
    """Advise a rate by the linear rule (Goyal et al. 2017), for a global batch that is not the preset's."""
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
    if strategy in ("dp", "ddp"):
        text += (
            " In a script of your own dp divides one batch among the GPUs (the rate stays), ddp gives each its own;"
            " batch_size here is each rank's in both."
        )
    return Advice("lr", text, f"{suggested:g}")


def model_advice(situation: Situation) -> Advice | None:
    """Advise another model, or dimensions that are multiples of 8 (tensor cores) or, for the vocabulary, of 64."""
    if situation.model_refusal is not None:
        return Advice("model", situation.model_refusal)
    hints = []
    for name, length in (situation.shapes or {}).items():
        unit, aligned, more = TENSOR_CORE_UNIT, _aligned(length), ""
        if name == "vocab_size":
            unit, aligned = VOCABULARY_UNIT, -(-length // VOCABULARY_UNIT) * VOCABULARY_UNIT
            more = ", and the added rows are never used"
        if length % unit:
            hints.append(f"model.{name}={aligned} instead of {length}: a multiple of {unit} suits tensor cores{more}.")
    return Advice("model", " ".join(hints)) if hints else None


def _aligned(length: int) -> int:
    """Return the nearest multiple of `TENSOR_CORE_UNIT`, at least one."""
    return max(TENSOR_CORE_UNIT, round(length / TENSOR_CORE_UNIT) * TENSOR_CORE_UNIT)


@dataclass(frozen=True)
class Situation:
    """Facts about model and machine that advice needs besides the knobs; None if unknown."""

    size: ModelSize | None = None
    shapes: Mapping[str, int] | None = None
    """Hidden and vocabulary size under the names the configuration gives them."""
    links: Interconnect | None = None
    model_refusal: str | None = None
    """The reason that the model cannot be trained."""


@dataclass(frozen=True)
class Advice:
    """One paragraph about a knob, and the advised value as typed; None for advice without a value."""

    knob: str
    text: str
    value: str | None = None


def _global_batch_or_none(spec: RunSpec, knobs: KnobValues, machine: Machine) -> int | None:
    """Return the global batch with these knobs; None if there are too few devices."""
    try:
        return global_batch(knobs, device_count(replace(spec, knobs=knobs), machine))
    except UserError:
        return None


SHAPE_FIELDS = ("hidden_size", "n_embd", "d_model", "intermediate_size", "n_inner", "d_ff", "vocab_size")
"""Fields of a configuration that are sides of a model's matrices."""


def gather(spec: RunSpec, machine: Machine, python: str | None = None) -> Situation:
    """Return the situation of a run, about a second the first time for a model; unavailable facts stay unknown."""
    model_refusal = None
    try:
        config = warm_python.inspect(python, spec.model, spec.data["objective"]).config
    except UserError as error:
        config = {}
        if error.key != "python":
            model_refusal = error.line()
    return Situation(
        size=model_size(config),
        shapes={name: config[name] for name in SHAPE_FIELDS if isinstance(config.get(name), int)},
        links=read_links_among({gpu.uuid for gpu in machine.gpus if gpu.uuid}),
        model_refusal=model_refusal,
    )


ZERO_ONLY_SLOWS = "DeepSpeed only slows a model that already fits with a reasonable batch."
"""A reason that several pieces of advice share."""
FITTING_SHARE = 0.9
"""A model fits if states and context take at most this share of a device's memory."""


def _by_decision_tree(spec: RunSpec, machine: Machine, situation: Situation) -> tuple[str, str]:
    """Return the strategy that Hugging Face's decision tree chooses on estimated memory, and the reason."""
    if machine.device == "cpu":
        return "single", (
            f"on a CPU the processes of other strategies share its {machine.cores} cores; ddp with devices=2"
            " shows how one works, not how fast it is."
        )
    usable = [gpu for gpu in machine.gpus if gpu.error is None]
    gpu_bytes = min((gpu.memory_total_bytes for gpu in usable if gpu.memory_total_bytes is not None), default=0)
    size, links, count = situation.size, situation.links, len(usable)
    if size is None or not gpu_bytes:
        strategy = "single" if count < 2 else "ddp"
        return strategy, "the model's size is not known here; this is what suits a model that fits one GPU."
    precision, optimizer, method = (str(spec.knobs[name]) for name in ("precision", "optimizer", "method"))

    def fits(strategy: str) -> bool:
        needed_bytes = state_bytes(size, strategy, count, precision, optimizer, method) + CONTEXT_BYTES
        return needed_bytes <= FITTING_SHARE * gpu_bytes

    each_bytes = bytes_per_parameter(precision, optimizer, method)
    all_bytes = state_bytes(size, "single", count, precision, optimizer, method)
    estimate = (
        f"estimate: {each_bytes} bytes x {_short_count(size.parameters)} parameters"
        f" = {short_gibibytes(all_bytes)} of weights, gradients and"
        f" states, of {short_gibibytes(gpu_bytes)} a GPU, activations not counted"
    )
    if count < 2:
        if fits("single"):
            return "single", f"the model fits this GPU ({estimate}). {ZERO_ONLY_SLOWS}"
        lighter = "checkpointing=full, optimizer=adamw-8bit or precision=bf16-pure cost less speed, so try them first"
        offloading = [strategy for strategy in ("zero2-offload", "zero3-offload") if fits(strategy)]
        rest = "offloading moves states to RAM" if offloading else "it may need more than one GPU"
        reason = f"the model does not fit this GPU ({estimate}): {lighter}; {rest}."
        return next(iter(offloading), "zero3-offload"), reason
    if fits("ddp"):
        return "ddp", (
            f"the model fits each of {count} GPUs ({estimate}); ddp exchanges gradients only."
            f" Take zero2 only where it measures faster. {ZERO_ONLY_SLOWS}"
        )
    layer_bytes = 4 * size.largest_layer + CONTEXT_BYTES
    if layer_bytes > FITTING_SHARE * gpu_bytes:
        return "tp", (
            f"not even the largest layer fits one GPU ({short_gibibytes(layer_bytes)} with the context): tp cuts the"
            " layers themselves; else zero3-offload with checkpointing and an 8-bit optimizer."
        )
    if not fits("zero3"):
        return "zero3-offload", f"the model does not fit {count} GPUs together ({estimate}): states have to go to RAM."
    too_large = f"the model does not fit one GPU ({estimate})"
    if links is not None and links.all_nvlink:
        return "fsdp", (
            f"{too_large}; over NVLink fsdp, zero3, tp and pp are about equal, and fsdp asks least of the model:"
            " measure them."
        )
    if links is not None and links.any_nvlink:
        return "pp", (
            f"{too_large} and NVLink joins only some of them: pp sends the least over the slow links; tp stays within"
            " a group."
        )
    return "pp", f"{too_large} and without NVLink pp beats tp and zero."


def _short_count(count: int) -> str:
    return f"{count / 1e9:.2f} G" if count >= 1e9 else f"{count / 1e6:.0f} M" if count >= 1e6 else f"{count:,}"
