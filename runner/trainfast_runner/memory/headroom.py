"""Predict runs beside the available memory, and the largest batch that fits: for `predict`, `run.json` and the bar.

Estimates from a model's configuration alone follow: its parameters, and the bytes a training step keeps for each. Their
rules are the guides' ("Anatomy of a model's memory" and the ZeRO paper, Rajbhandari et al. 2020). They leave out
activations, temporary buffers and the CUDA context, and are called estimates wherever they are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.machine import warm_python
from trainfast_runner.machine.devices import Machine, detect_machine
from trainfast_runner.machine.resource_limits import read_host_free_bytes
from trainfast_runner.memory.model import MemoryModel, batch_multiple
from trainfast_runner.memory.timeline import FP32_BYTES
from trainfast_runner.records.run_directory import EXIT_CODES, RunRecords
from trainfast_runner.records.run_file import Prediction
from trainfast_runner.settings import device_counts, presets
from trainfast_runner.settings.compatibility import refusal_anywhere, refusal_here
from trainfast_runner.settings.device_counts import chosen_gpus, first_gpu_name, first_size, model_degree
from trainfast_runner.settings.knob_values import tightest_limit_bytes
from trainfast_runner.settings.precisions import PRECISIONS
from trainfast_runner.settings.spec import RunSpec, from_preset, published_for, resolve, spec_of_record, strategy_of
from trainfast_runner.units import asks_for_cpu, largest_fitting, mebibytes
from trainfast_runner.worker.catalog import OPTIMIZERS, STRATEGIES, WITH_ADAPTERS

if TYPE_CHECKING:
    from trainfast_runner.memory.tracing import TraceProgress


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """Available memory of the tightest rank, in bytes."""

    size_bytes: int
    source: str
    """The origin of the figure, as text."""
    with_context: bool = False
    """True if a CUDA context takes some of these bytes too, as of a GPU's free memory; `memory_limit` caps the
    allocator alone."""
    from_memory_limit: bool = False
    """True if this is the limit set for the run, and not the free memory."""

    def for_allocator(self, context_bytes: int | None) -> int:
        """Bytes left for tensors beside a context of this size; nothing is taken off for an unknown size, None."""
        return max(0, self.size_bytes - (context_bytes or 0)) if self.with_context else self.size_bytes


def available_memory(
    spec: RunSpec,
    machine: Machine,
    ranks: int,
    host_free_bytes: int | None,
    context_bytes: int | None = None,
    *,
    is_here: bool = True,
) -> AvailableMemory | None:
    """Return the smaller of `memory_limit` and the free memory: of the fullest GPU, or a share of the host's.

    `host_free_bytes` and `context_bytes` (a CUDA context) are None if unknown. With `is_here` False the run is for
    another machine, and free memory does not count. None when nothing is known. Raises UserError for GPUs that do not
    exist.
    """
    free = _free_memory(spec, machine, ranks, host_free_bytes) if is_here else None
    limit_bytes = tightest_limit_bytes(spec.knobs)
    if limit_bytes is None:
        return free
    limit = AvailableMemory(limit_bytes, "memory_limit", from_memory_limit=True)
    if free is None or limit.size_bytes <= free.for_allocator(context_bytes):
        return limit
    return AvailableMemory(free.size_bytes, f"{free.source}, less than memory_limit", free.with_context)


def _free_memory(spec: RunSpec, machine: Machine, ranks: int, host_free_bytes: int | None) -> AvailableMemory | None:
    gpus = chosen_gpus(spec.knobs, machine)
    if free := [(gpu.memory_free_bytes, gpu.index) for gpu in gpus if gpu.memory_free_bytes is not None]:
        return AvailableMemory(min(free)[0], f"free on GPU {min(free)[1]}", with_context=True)
    if host_free_bytes is None:
        return None
    source = "free" if ranks == 1 else f"free, shared by {ranks} processes"
    if gpus:
        # A GPU without a memory reading has none of its own: it shares the host's.
        source = f"free on the host, whose memory GPU {gpus[0].index} shares"
    return AvailableMemory(host_free_bytes // max(1, ranks), source, with_context=bool(gpus))


UNTOUCHED_BYTES = 12 << 20
"""Address space reserved and never touched, which a limit of a CPU counts too (measured: 8.0 to 10.8 MiB)."""
UNCORRECTED_MARGIN_BYTES = 32 << 20
"""`UNTOUCHED_BYTES`, buffers of libraries and small blocks beyond an uncorrected prediction (measured: 7 to 21 MiB)."""
UNCORRECTED_MARGIN_SHARE = 0.03
"""Least share of the peak in an uncorrected margin: the error of uncorrected predictions of larger models."""
EXTRAPOLATED_SHARE = 0.015
"""Share of the growth beyond the measured size: the error of a slope, as in a batch search."""
COMPILER_BYTES = 128 << 20
"""Memory of the compiler and its programs (measured: 52 to 108 MiB, and 33 MiB not touched)."""
TRAINER_BYTES = 20 << 20
"""Memory of transformers' Trainer (tiny-llama: 15 to 19 MiB)."""


@dataclass(frozen=True, slots=True)
class PredictedFit:
    """A prediction beside the available memory."""

    predicted: Prediction
    available: AvailableMemory | None = None
    """The available memory; None if it is unknown, and with it the two figures below."""
    margin_bytes: int = 0
    """Bytes that must stay free beside the predicted peak for the run to survive."""
    max_batch: int | None = None
    """The largest batch that fits; 0 if not even one sample does."""
    refusal: UserError | None = None
    """The refusal of a run that this machine lacks the devices for."""

    @property
    def needed_bytes(self) -> int:
        """Memory the run needs: the peak, its margin, and the CUDA context if that comes out of the same memory."""
        with_context = self.available is not None and self.available.with_context
        context_bytes = self.predicted.context_bytes if with_context else None
        return self.predicted.total_bytes + self.margin_bytes + (context_bytes or 0)

    @property
    def left_bytes(self) -> int | None:
        """Bytes left over; negative if the run does not fit, None if the available memory is unknown."""
        return None if self.available is None else self.available.size_bytes - self.needed_bytes

    @property
    def fits(self) -> bool | None:
        """True if the run fits; None if the available memory is unknown."""
        return None if self.left_bytes is None else self.left_bytes >= 0


def predict_headroom(
    model: MemoryModel, spec: RunSpec, machine: Machine, ranks: int, host_free_bytes: int | None
) -> PredictedFit:
    """Predict a run on this machine, whose host has `host_free_bytes` free (None if unknown).

    Raises UserError for GPUs that do not exist, and for a strategy whose memory is not predicted.
    """
    refusal = refusal_here(spec, machine)
    if refusal is None:
        model = model.corrected_for(first_gpu_name(spec, machine))
    predicted = model.predict(spec, ranks)
    # A run that cannot run here is planned for another machine: free memory here does not matter.
    available = available_memory(
        spec, machine, ranks, host_free_bytes, predicted.context_bytes, is_here=refusal is None
    )
    if available is None:
        return PredictedFit(predicted, refusal=refusal)
    # RLIMIT_DATA also counts memory outside the trace; a GPU's cap does not.
    needs_margin = model.device == "cpu" and available.from_memory_limit
    max_batch = model.max_batch(spec, ranks, available.for_allocator(predicted.context_bytes))
    if not needs_margin:
        return PredictedFit(predicted, available, 0, max_batch, refusal)

    def fits(batch: int) -> bool:
        sized = replace(spec, knobs={**spec.knobs, "batch_size": batch})
        prediction = model.predict(sized, ranks)
        return PredictedFit(prediction, available, margin_bytes(model, sized, ranks, prediction)).fits is True

    max_batch = largest_fitting(fits, max_batch, batch_multiple(spec.knobs))
    return PredictedFit(predicted, available, margin_bytes(model, spec, ranks, predicted), max_batch, refusal)


def margin_bytes(model: MemoryModel, spec: RunSpec, ranks: int, predicted: Prediction) -> int:
    """Bytes a limit of a CPU must have beside the predicted peak: as earlier runs took them, else by the constants."""
    program_bytes = COMPILER_BYTES if spec.knobs["compile"] != "off" else 0
    if (correction := model.correction_for(spec, ranks)) is not None:
        grown_bytes = max(0, predicted.traced_bytes["forward_backward"] - (correction.step_bytes or 0))
        return program_bytes + UNTOUCHED_BYTES + int(EXTRAPOLATED_SHARE * grown_bytes)
    program_bytes += TRAINER_BYTES if spec.knobs["engine"] == "trainer" else 0
    return program_bytes + max(UNCORRECTED_MARGIN_BYTES, int(UNCORRECTED_MARGIN_SHARE * predicted.total_bytes))


@dataclass(frozen=True)
class RunToPredict:
    """One run to be predicted."""

    id: str
    spec: RunSpec
    published: Mapping[str, Any]
    """A variant's published figures."""
    unpublished: str = ""
    """The reason that they are left out; empty if they are not."""


@dataclass(frozen=True)
class PredictedRow:
    """A run's prediction, or its UserError as `error`."""

    run: RunToPredict
    fit: PredictedFit | None = None
    model: MemoryModel | None = None
    """The model that made the prediction."""
    machine: Machine | None = None
    """The machine that the run is for."""
    limit_error: UserError | None = None
    """The refusal of a limit below the weights alone."""
    error: UserError | None = None


def runs_to_predict(reference: str, settings: list[str]) -> list[RunToPredict]:
    """Return the run of PRESET or NAME/VARIANT, or each variant of a preset that has some. Raises UserError."""
    preset, chosen_variant = presets.load(reference)
    if chosen_variant is not None or not preset.variants:
        spec = resolve(reference, settings)
        if chosen_variant is None:
            return [RunToPredict(spec.name, spec, {})]
        return [RunToPredict(chosen_variant.id, spec, *published_for(preset, chosen_variant, spec))]
    specs = [(variant, from_preset(preset, variant, settings)) for variant in preset.variants]
    return [RunToPredict(variant.id, spec, *published_for(preset, variant, spec)) for variant, spec in specs]


def predict_rows(
    runs: list[RunToPredict], python: str | None, on_traced: Callable[[TraceProgress], None]
) -> Iterator[tuple[int, PredictedRow]]:
    """Yield each run's index and its row as soon as it is ready; a run that cannot be predicted has its `error`.

    `on_traced` gets the progress of the traces. Raises UserError if the training Python cannot be asked, and if all
    runs are for GPUs that cannot be used.
    """
    # Imported late: the supervisor and a launch start without the tracer.
    from trainfast_runner.memory.tracing import trace_models

    # The model is left out: its trace tells whether it can be built.
    versions = warm_python.inspect(python, {}, runs[0].spec.data["objective"]).versions
    machine = detect_machine(versions)
    if machine.refusal is not None and not any(asks_for_cpu(run.spec.knobs["devices"]) for run in runs):
        raise machine.refusal
    specs_by_device: dict[str, dict[int, RunSpec]] = {}
    for index, run in enumerate(runs):
        used_machine = machine.used_by(run.spec.knobs["devices"])
        try:
            if used_machine.refusal is not None:
                raise used_machine.refusal
            spec = device_counts.with_devices(run.spec, machine)
            if (refusal := refusal_anywhere(spec, machine)) is not None:
                raise refusal
        except UserError as error:
            yield index, PredictedRow(run, error=error)
        else:
            specs_by_device.setdefault(used_machine.device, {})[index] = spec
    for device, specs in specs_by_device.items():
        gpus = [gpu.uuid for gpu in machine.gpus if gpu.uuid] if device == "cuda" else []
        for number, model in trace_models([*specs.values()], device, python, on_traced, gpus=gpus):
            index = [*specs][number]
            yield index, _predicted_row(replace(runs[index], spec=specs[index]), model, machine)


def _predicted_row(run: RunToPredict, model: MemoryModel | UserError, machine: Machine) -> PredictedRow:
    if isinstance(model, UserError):
        return PredictedRow(run, error=model)
    try:
        ranks = device_counts.world_size(run.spec, machine)
        fit = predict_headroom(model, run.spec, machine, ranks, read_host_free_bytes())
        parameters = None if strategy_of(run.spec.knobs).is_tensor_parallel else model.parameters
        limit_error = limit_below_weights_error(run.spec, parameters, device_counts.device_count(run.spec, machine))
    except UserError as error:
        return PredictedRow(run, error=error)
    return PredictedRow(run, fit, model, machine, limit_error)


def published_bytes(published: Mapping[str, Any]) -> int | None:
    """The memory among published figures, in bytes; None if there is none.

    They are MiB as NVML counts them, or decimal GB as the notebook prints.
    """
    for name, unit in (("memory_mb", 2**20), ("memory_gb", 10**9)):
        value = published.get(name)
        if isinstance(value, int | float):
            return round(value * unit)
    return None


def with_prediction(records: RunRecords) -> RunRecords:
    """Add a prediction to the records if `run.json` was written before there was one.

    Nothing is traced for it, and the run itself has not corrected it yet.
    """
    run = records.run
    if run is None or run.predicted is not None or run.script is not None:
        return records
    try:
        prediction = cached_prediction(
            spec_of_record(run), run.device, run.python or None, run.world_size, run.device_names
        )
    except Exception:
        # A prediction that fails, as with another version's knobs, must not change how the run ends.
        return records
    return replace(records, run=msgspec.structs.replace(run, predicted=prediction))


def cached_prediction(
    spec: RunSpec, device: str, python: str | None, world_size: int, gpus: list[str]
) -> Prediction | None:
    """A run's prediction by an earlier trace; `gpus` are the names of its GPUs.

    None without a trace, and for a strategy whose memory is not predicted.
    """
    # Imported late, as in `predict_rows`.
    from trainfast_runner.memory.tracing import cached_model

    try:
        model = cached_model(spec, device, python)
        gpu = next(iter(gpus), None)
        return None if model is None else model.corrected_for(gpu).predict(spec, world_size)
    except UserError:
        return None


CONTEXT_BYTES = 3 << 29
"""Memory of the CUDA context and the kernels, 1 to 2 GB outside the allocator."""


@dataclass(frozen=True)
class ModelSize:
    """Estimated number of parameters: in all, and of the largest layer (a block or the vocabulary's table)."""

    parameters: int
    largest_layer: int


def model_size(config: Mapping[str, Any]) -> ModelSize | None:
    """Estimate the parameters from a transformers configuration; None for an unknown kind of model."""

    def size(*names: str) -> int:
        return first_size(config, *names)[1]

    hidden = size("hidden_size", "n_embd", "d_model")
    layers = size("num_hidden_layers", "n_layer", "num_layers")
    heads = size("num_attention_heads", "n_head", "num_heads")
    if not (hidden and layers and heads):
        return None
    inner_size = size("intermediate_size", "n_inner", "d_ff") or 4 * hidden
    per_head = size("head_dim", "d_kv") or hidden // heads
    kv_heads = size("num_key_value_heads") or heads
    attention = 2 * hidden * heads * per_head + 2 * hidden * kv_heads * per_head
    gated = any(key.startswith("rope") for key in config) or "gated" in str(config.get("feed_forward_proj", ""))
    experts = size("num_local_experts", "num_experts") or 1
    feed_forward = (3 if gated else 2) * hidden * inner_size * experts
    block = attention + feed_forward
    decoder_layers = size("num_decoder_layers") or (layers if config.get("is_encoder_decoder") else 0)
    blocks = layers * block + decoder_layers * (block + attention)
    vocabulary = size("vocab_size") * hidden
    positions = 0 if gated else size("n_positions", "max_position_embeddings") * hidden
    tables = vocabulary * (1 if config.get("tie_word_embeddings", True) else 2) + positions
    return ModelSize(blocks + tables, max(block, vocabulary))


def bytes_per_parameter(precision: str, optimizer: str, method: str = "full") -> int:
    """Weights, gradients and optimizer states of one device that keeps everything; with adapters the frozen weights.

    fp32 AdamW 16, mixed 18 (the cast weights exist beside the fp32 ones), 8-bit AdamW 10, bf16-pure AdamW 8.
    """
    formats, entry = PRECISIONS[precision], OPTIMIZERS[optimizer]
    width = formats.weight_bytes
    if method in WITH_ADAPTERS:
        return 1 if method == "qlora" else width + (formats.compute_bytes if formats.is_mixed else 0)
    states = round(entry.state_tensors * (entry.state_bytes or width))
    return 2 * width + states + (formats.compute_bytes if formats.is_mixed else 0)


def least_weight_bytes(parameters: int, knobs: Mapping[str, object], devices: int) -> int:
    """Least bytes of weights on each device of a strategy; 0 if they may all be in host memory.

    By an even cut: the device with the embeddings keeps more, and a block is gathered whole while it computes.
    """
    strategy, formats = strategy_of(knobs), PRECISIONS[str(knobs["precision"])]
    if strategy.offloads and "weights" in strategy.shards:
        return 0
    # DeepSpeed keeps the weights in half precision, and the masters with the states.
    width = formats.compute_bytes if strategy.is_zero else formats.weight_bytes
    if knobs["method"] == "qlora":
        # Less than half a byte no weight takes.
        return parameters // 2
    shards = devices if "weights" in strategy.shards or "mp" in strategy.axes else model_degree(knobs)
    return parameters * width // shards


def limit_below_weights_error(spec: RunSpec, parameter_count: int | None, device_count: int) -> UserError | None:
    """The refusal of a `memory_limit` that the weights alone exceed; None if they fit or are unknown."""
    limit_bytes = tightest_limit_bytes(spec.knobs)
    if parameter_count is None or limit_bytes is None:
        return None
    needed_bytes = least_weight_bytes(parameter_count, spec.knobs, device_count)
    if limit_bytes >= needed_bytes:
        return None
    return UserError(
        f"memory_limit={spec.knobs['memory_limit']} is below what the {parameter_count:,} parameters alone need"
        f"{' on each device' if device_count > 1 else ''}: {needed_bytes:,} bytes ({mebibytes(needed_bytes)})",
        key="memory_limit",
        exit_code=EXIT_CODES["oom"],
    )


def state_bytes(
    size: ModelSize, strategy: str, devices: int, precision: str, optimizer: str, method: str = "full"
) -> int:
    """Estimated bytes of weights, gradients and states that each of `devices` keeps: all, or a share under a strategy
    that shards the weights, beside the largest layer, which is gathered whole; offloaded parts are in host memory.
    """
    entry = STRATEGIES[strategy]
    gathered_bytes = FP32_BYTES * size.largest_layer if "weights" in entry.shards else 0
    if entry.offloads:
        return gathered_bytes or size.parameters * 2 * PRECISIONS[precision].compute_bytes
    shards = devices if gathered_bytes else 1
    return gathered_bytes + size.parameters * bytes_per_parameter(precision, optimizer, method) // shards
