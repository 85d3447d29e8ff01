"""Estimates from a model's configuration alone: its parameters, and the bytes a training step keeps for each.

The rules are the guides' ("Anatomy of a model's memory" and the ZeRO paper, Rajbhandari et al. 2020). They leave out
activations, temporary buffers and the CUDA context, and are called estimates wherever they are shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainfast_runner.errors import UserError
from trainfast_runner.records.run_directory import EXIT_CODES
from trainfast_runner.settings.device_counts import first_size, model_degree
from trainfast_runner.settings.knob_values import tightest_limit_bytes
from trainfast_runner.settings.precisions import PRECISIONS
from trainfast_runner.settings.spec import RunSpec, strategy_of
from trainfast_runner.units import mebibytes
from trainfast_runner.worker.catalog import OPTIMIZERS, STRATEGIES

FP32_BYTES = 4
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


def bytes_per_parameter(precision: str, optimizer: str) -> int:
    """Weights, gradients and optimizer states of one device that keeps everything.

    fp32 AdamW 16, mixed 18 (the cast weights exist beside the fp32 ones), 8-bit AdamW 10, bf16-pure AdamW 8.
    """
    formats, entry = PRECISIONS[precision], OPTIMIZERS[optimizer]
    width = formats.weight_bytes
    states = entry.state_tensors * (1 if entry.eight_bit else width)
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


def state_bytes(size: ModelSize, strategy: str, devices: int, precision: str, optimizer: str) -> int:
    """Estimated bytes of weights, gradients and states that each of `devices` keeps under a strategy.

    ZeRO-1 shards the states, ZeRO-2 the gradients as well (2P + 18P/N under mixed precision), ZeRO-3 and FSDP all of
    it but the largest layer, which is gathered whole; offloaded parts are in host memory.
    """
    entry = STRATEGIES[strategy]
    parameters = size.parameters
    per_parameter = bytes_per_parameter(precision, optimizer)
    weight_width = PRECISIONS[precision].compute_bytes
    gathered_bytes = FP32_BYTES * size.largest_layer
    if entry.offloads:
        return gathered_bytes if "weights" in entry.shards else parameters * 2 * weight_width
    if "weights" in entry.shards:
        return gathered_bytes + parameters * per_parameter // devices
    if "gradients" in entry.shards:
        return parameters * weight_width + parameters * per_parameter // devices
    if "states" in entry.shards:
        return (
            parameters * (weight_width + FP32_BYTES)
            + parameters * max(0, per_parameter - weight_width - FP32_BYTES) // devices
        )
    if entry.copies_gradients:
        return parameters * (per_parameter + PRECISIONS[precision].weight_bytes)
    return parameters * per_parameter // (1 if entry.one_device or "dp" in entry.axes else devices)
