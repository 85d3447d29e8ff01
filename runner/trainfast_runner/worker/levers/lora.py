"""`method`: peft's adapters put into a model in place, and the matrices of its blocks in four bits for `qlora`.

A model has its adapters before it has weights. The base is initialized as a whole model is, without its adapters, so
that its values do not depend on the method; a matrix that is to be quantized keeps its own shape until it has values.
"""

import importlib
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..catalog import LEVERS
from ..catalog.levers import ALL_LAYERS, ATTENTION_LAYERS, KINDS_OF_LAYERS
from ..invalid import InvalidInput, unknown_name
from ..spec import Knobs
from .blocks import outermost_blocks

ADAPTER = "default"
"""The name of the adapter."""
ATTENTION_PARTS = ("attention", "attn")
"""Parts of the names of attention modules, in lower case."""
VALUES_A_SCALE, SCALES_A_SCALE = 64, 256
"""Weights that share a scale in NF4, and scales that share one of their own (QLoRA, Dettmers et al. 2023)."""
CODE_SIZES = (16, 256)
"""Values of NF4's table, and of the table of quantized scales."""


def import_packages(method: str) -> None:
    """Import the packages of a method."""
    for package in (LEVERS["method"][method].package or "").split():
        importlib.import_module(package)


def put_adapters(model: Any, knobs: Knobs) -> None:
    """Freeze the model and put adapters beside the targeted layers, in place; for `qlora` of four bits.

    Raises InvalidInput for a target that the model does not have, and for the head of a chunked loss.
    """
    from peft import LoraConfig, inject_adapter_in_model

    is_quantized = knobs.lever("method") == "qlora"
    names = targeted(model, str(knobs.others["lora_targets"]))
    if knobs.lever("loss") != "full" and model.get_output_embeddings() in map(model.get_submodule, names):
        # Its loss reads the weight of the head alone.
        message = f"an adapter of the head does nothing with loss={knobs.lever('loss')}"
        raise InvalidInput(message, key="lora_targets", allowed=KINDS_OF_LAYERS, nearest=ATTENTION_LAYERS)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    is_transposed = isinstance(model.get_submodule(names[0]), Conv1D)
    if is_quantized:
        _make_quantizable(model, torch.float16 if knobs.precision == "fp16" else torch.bfloat16)
        # peft's own mark of a model whose linear layers it may find in four bits.
        model.is_loaded_in_4bit = True
    rank = int(knobs.others["lora_rank"])
    config = LoraConfig(
        r=rank, lora_alpha=rank, target_modules=names, fan_in_fan_out=is_transposed and not is_quantized
    )
    inject_adapter_in_model(config, model, ADAPTER, low_cpu_mem_usage=True)
    for _, layer in adapted_layers(model):
        for matrix in _adapter(layer):
            # As peft does in `get_peft_model`: half weights would not take small updates.
            matrix.to(torch.float32)
    if type(model).__name__.endswith(("ForSequenceClassification", "ForImageClassification")):
        # A head of random weights is trained whole, as peft does for these tasks (`modules_to_save`).
        for name, parameter in model.named_parameters():
            if not name.startswith(f"{model.base_model_prefix}."):
                parameter.requires_grad_(True)


def actual(model: nn.Module) -> dict[str, Any]:
    """Return `method` and `adapted_layers`, read from the layers of the live model."""
    names = [name for name, _ in adapted_layers(model)]
    method = "full" if not names else "qlora" if quantized_tensors(model) else "lora"
    # Without the number of the block, and what is before it.
    layers = dict.fromkeys(re.split(r"(?:^|.*\.)\d+\.", name)[-1] for name in names)
    return {"method": method, "adapted_layers": list(layers) or None}


def targeted(model: nn.Module, targets: str) -> list[str]:
    """Full names of the layers that get adapters. Raises InvalidInput for a name that no layer has."""
    inside = {id(module) for block in outermost_blocks(model) for module in block.modules()}
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    in_blocks = [name for name, module in layers.items() if id(module) in inside]
    if targets == ALL_LAYERS:
        found = in_blocks
    elif targets == ATTENTION_LAYERS:
        found = [name for name in in_blocks if any(part in name.lower() for part in ATTENTION_PARTS)]
    else:
        found = []
        for target in targets.split("+"):
            of_target = [name for name in layers if f".{name}".endswith(f".{target}")]
            if not of_target:
                kind = f"linear layer of {type(model).__name__}"
                raise unknown_name(kind, target, "lora_targets", {name.rpartition(".")[2] for name in layers})
            found += of_target
    if not found:
        message = f"{type(model).__name__} has no linear layers for lora_targets={targets}"
        raise InvalidInput(message, key="lora_targets", allowed=sorted({name.rpartition(".")[2] for name in layers}))
    return list(dict.fromkeys(found))


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield each layer with an adapter, with its full name."""
    yield from ((name, module) for name, module in model.named_modules() if hasattr(module, "lora_A"))


def _adapter(layer: Any) -> tuple[nn.Module, nn.Module]:
    return layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Put the layers without their adapters in the place of those with them: all names are those of `method=full`."""
    layers = list(adapted_layers(model))
    places = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], layer) for name, layer in layers]
    for parent, key, layer in places:
        parent._modules[key] = layer.base_layer
    try:
        yield
    finally:
        for parent, key, layer in places:
            parent._modules[key] = layer


def init_adapter(layer: Any, device: torch.device) -> None:
    """Give a layer's adapter memory on `device`, and the values that peft starts from."""
    for matrix in _adapter(layer):
        matrix.to_empty(device=device)
    layer.reset_lora_parameters(ADAPTER, True)


def _make_quantizable(model: nn.Module, compute_dtype: torch.dtype) -> None:
    """Put layers of four bits in the place of the linear layers of the blocks; `quantize` gives them their weights."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    if any(parameter.dim() > 2 for block in outermost_blocks(model) for parameter in block.parameters()):
        # Experts in one tensor: bitsandbytes' layers are matrices, and most of the model would stay whole.
        family = model.config.model_type  # type: ignore[union-attr]
        message = f"method=qlora quantizes matrices, and {family} has its experts in tensors of three dimensions"
        raise InvalidInput(message, key="method", allowed=["full", "lora"], nearest="lora")
    # As transformers does: their code reads the format of these weights.
    whole = getattr(model, "_keep_in_fp32_modules", None) or ()
    for block in outermost_blocks(model):
        for parent in list(block.modules()):
            for key, layer in list(parent.named_children()):
                if not isinstance(layer, nn.Linear | Conv1D) or key in whole:
                    continue
                columns, rows = reversed(layer.weight.shape) if isinstance(layer, nn.Linear) else layer.weight.shape
                quantizable: Any = Linear4bit(columns, rows, bias=False, compute_dtype=compute_dtype, device="meta")
                # With the shape of the layer that it replaces, which decides about the first values.
                quantizable.weight = Params4bit(layer.weight.data, quant_type="nf4", module=quantizable)
                quantizable.bias = layer.bias
                quantizable.is_quantized_transposed = isinstance(layer, Conv1D)
                setattr(parent, key, quantizable)


def awaits_quantization(module: nn.Module) -> bool:
    """True if the module is a layer of four bits whose weight is not quantized yet."""
    return hasattr(module, "is_quantized_transposed") and getattr(module, "quant_state", None) is None


def quantize(module: Any, *, fake: bool = False) -> None:
    """Quantize the weight of a layer of four bits, from bf16; with `fake` make tensors of its sizes without values."""
    weight = module.weight
    elements, device = weight.numel(), weight.device
    if fake:
        packed, state = _empty_quantized(module, weight)
        module.weight = nn.Parameter(packed, requires_grad=False)
        module.weight.quant_state = module.quant_state = state
    else:
        from bitsandbytes.nn import Params4bit

        rows = weight.data.t() if module.is_quantized_transposed else weight.data
        values = rows.to(torch.bfloat16).contiguous()
        module.weight = Params4bit(values, quant_type="nf4", module=module).to(device)
    module.weight.whole_numel = elements


def _empty_quantized(module: Any, like: Tensor) -> tuple[Tensor, Any]:
    """Return a packed weight and its `QuantState` of the sizes that bitsandbytes makes, without values."""
    from bitsandbytes.functional import QuantState

    def empty(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=like.device)

    scales = math.ceil(like.numel() / VALUES_A_SCALE)
    of_scales = QuantState(
        absmax=empty(math.ceil(scales / SCALES_A_SCALE)),
        code=empty(CODE_SIZES[1]),
        blocksize=SCALES_A_SCALE,
        dtype=torch.float32,
    )
    state = QuantState(
        absmax=empty(scales, torch.uint8),
        shape=torch.Size((module.out_features, module.in_features)),
        code=empty(CODE_SIZES[0]),
        blocksize=VALUES_A_SCALE,
        quant_type="nf4",
        dtype=torch.bfloat16,
        offset=empty(1)[0],
        state2=of_scales,
    )
    return torch.empty(((like.numel() + 1) // 2, 1), dtype=torch.uint8, device=like.device), state


def quantized_tensors(model: nn.Module) -> list[Tensor]:
    """Return the tensors of all quantized weights: the packed values, the scales and their tables."""
    tensors: list[Tensor] = []
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            tensors += [parameter, state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
    return tensors
