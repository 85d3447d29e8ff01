"""Build a model for the objective from its configuration; a strategy initializes its weights later.

The `compile` knob is torch.compile of the module whose forward the loop calls, and a watch for the steps that compiled.
"""

import copy
import importlib.metadata
import inspect
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import nn

from ..catalog import ATTENTION_IMPLEMENTATIONS, WITH_ADAPTERS, compile_mode
from ..catalog.levers import KINDS_OF_LAYERS
from ..invalid import InvalidInput, one_line
from ..levers import apply_levers, float8, lora
from ..levers.blocks import outermost_blocks
from ..memory.memory_meter import MemoryMeter
from ..spec import Knobs
from .model_config import HEAD_OF_OBJECTIVE, check_family
from .weights import without_weights

BESIDES_PIXELS = {"input_ids", "spatial_shapes"}
"""Other inputs of some image classifiers: text, or patches cut by a processor of their own."""


def model_class(objective: str) -> Any:
    """The transformers Auto class that puts the objective's head on a configuration."""
    return getattr(transformers, f"AutoModelFor{HEAD_OF_OBJECTIVE[objective][0]}")


def import_model_code(config: Any, objective: str) -> None:
    """Import the file of the model's class now, so that it does not count as the model's memory."""
    # `build_model` reports a class that does not exist.
    with suppress(KeyError):
        model_class(objective)._model_mapping[type(config)]


def check_adapters(config: Any, objective: str, knobs: Knobs) -> None:
    """Import the packages of adapters and look for their layers, before the model's memory is counted.

    Raises InvalidInput for a target that the model does not have.
    """
    lora.import_packages(knobs.lever("method"))
    if knobs.lever("method") in WITH_ADAPTERS:
        check_targets(config, objective, str(knobs.others["lora_targets"]))


def check_targets(config: Any, objective: str, targets: str) -> None:
    """Look for the layers that `lora_targets` names. Raises InvalidInput for a name that the model does not have."""
    if targets not in KINDS_OF_LAYERS and type(config) in model_class(objective)._model_mapping:
        with torch.device("meta"):
            model = model_class(objective).from_config(copy.deepcopy(config), trust_remote_code=False)
        lora.targeted(model, targets)


def _check_head(config: Any, objective: str) -> None:
    """Raise InvalidInput if transformers has no such head for this family, or one that needs other data."""
    check_family(config, objective)
    if objective == "image-classification" and type(config) in model_class(objective)._model_mapping:
        besides = BESIDES_PIXELS & set(inspect.signature(_head(config, objective).forward).parameters)
        if besides:
            needs = f"{config.model_type} classifies images by their {' and '.join(besides)}"
            raise InvalidInput(
                f"{needs}, and the loader gives it pixels alone", key="model", allowed=["vit", "resnet"], nearest="vit"
            )


def _head(config: Any, objective: str) -> Any:
    """The model's class. Raises KeyError for a family without this head."""
    head = model_class(objective)._model_mapping[type(config)]
    # transformers takes the first of several classes if the configuration names none.
    return head[0] if isinstance(head, tuple) else head


def build_model(config: Any, objective: str, knobs: Knobs, device: torch.device) -> nn.Module:
    """Build a model with its buffers on `device` and its matrices without memory, until `init_weights`.

    Raises InvalidInput if the architecture has no such head, no such attention or not a lever's value.
    """
    _check_head(config, objective)
    if objective == "sequence-classification" and config.pad_token_id is None:
        # A decoder's head reads the last token before the padding; packed samples have no padding.
        config.pad_token_id = 0
    if config.architectures is None:
        # transformers iterates over this list if a family has several classes for one head.
        config.architectures = []
    torch.manual_seed(knobs.seed)
    weights_dtype = torch.bfloat16 if knobs.precision == "bf16-pure" else torch.float32
    try:
        with torch.device(device), without_weights():
            model = model_class(objective).from_config(
                config,
                attn_implementation=ATTENTION_IMPLEMENTATIONS[knobs.attention],
                trust_remote_code=False,
                **{_dtype_argument(): weights_dtype},
            )
    except (ValueError, ImportError, KeyError) as error:
        raise _refusal(one_line(error), config.model_type, knobs.attention) from error
    model.config.use_cache = False
    apply_levers(model, knobs)
    if knobs.precision == "fp8":
        float8.convert(model, outermost_blocks(model))
    model.train()
    return cast(nn.Module, model)


def _refusal(reason: str, model_type: str, attention: str) -> InvalidInput:
    """Make the error for a model that transformers does not build; `reason` is its own message."""
    if "does not support an attention implementation" in reason:
        message = f"{model_type} has no attention={attention}"
        return InvalidInput(message, key="attention", allowed=["auto", "eager"], nearest="auto")
    key = "attention" if "attention" in reason.lower() else "data.objective"
    return InvalidInput(f"{model_type} cannot be built: {reason}", key=key)


def attentions(config: Any, objective: str) -> list[str]:
    """Values of `attention` that the model's class takes. Raises InvalidInput if the family has no such head."""
    _check_head(config, objective)
    head = _head(config, objective)
    names = ["auto", "eager"]
    if getattr(head, "_supports_sdpa", False):
        names += [name for name, implementation in ATTENTION_IMPLEMENTATIONS.items() if implementation == "sdpa"]
    # Renamed in transformers 4.53.
    if getattr(head, "_supports_flash_attn", False) or getattr(head, "_supports_flash_attn_2", False):
        names += ["flash", "flash-3"]
    return names


def attention_of(model: nn.Module) -> str | None:
    """The attention kernel of a built model, by transformers' name; None when unknown."""
    return getattr(model.config, "_attn_implementation", None)


def attention_reason(model: nn.Module, knobs: Knobs) -> str | None:
    """The reason for the kernel that `attention=auto` took; None if the knob names a kernel."""
    if knobs.attention != "auto":
        return None
    model_type: str = model.config.model_type  # type: ignore[union-attr, assignment]
    return f"{model_type} has sdpa" if attention_of(model) == "sdpa" else f"{model_type} has no sdpa"


def _dtype_argument() -> str:
    """Name of `from_config`'s argument for the weights' dtype, which changed in transformers 4.56."""
    major, minor = (int(part) for part in importlib.metadata.version("transformers").split(".")[:2])
    return "dtype" if (major, minor) >= (4, 56) else "torch_dtype"


def compiled(module: nn.Module, knobs: Knobs) -> nn.Module:
    """Compile `module` if the knob asks for it, with its wrapper, or its blocks in place.

    torch splits the graph at DDP's buckets, so that they still overlap with the backward. Raises InvalidInput for
    blocks of a model without a list of them.
    """
    if knobs.compile == "off":
        return module
    check_header("compile", knobs.compile, "off")
    if knobs.compile == "blocks":
        blocks = outermost_blocks(module)
        if not blocks:
            reason = f"{type(module).__name__} has no list of blocks to compile"
            raise InvalidInput(reason, key="compile", allowed=["off", "default"], nearest="default")
        for block in blocks:
            block.compile()
        return module
    mode = compile_mode(knobs.compile, knobs.grad_accum)
    compiled_module = cast(nn.Module, torch.compile(module, mode=mode))
    if mode in ("max-autotune", "reduce-overhead"):
        # CUDA graphs are replayed, and reuse the memory of the last step.
        compiled_module.register_forward_pre_hook(lambda *_: torch.compiler.cudagraph_mark_step_begin())  # type: ignore[no-untyped-call]
    return compiled_module


def unwrap(module: nn.Module) -> nn.Module:
    """Take off torch.compile's wrapper, if there is one."""
    unwrapped: nn.Module = getattr(module, "_orig_mod", module)
    return unwrapped


def check_header(knob: str, value: str, instead: str) -> None:
    """Raise InvalidInput, naming the package to install, if this Python has no header to compile kernels against.

    `value` of the knob compiles; `instead` does not.
    """
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise InvalidInput(
            f"{knob}={value} builds against {header}, which is not there; install with: "
            f"apt-get install python{version}-dev",
            key=knob,
            allowed=[instead],
            nearest=instead,
        )


class CompileWatch:
    """Notes whether torch compiled anything during a step, also a recompilation or a late backward.

    The memory that it takes meanwhile is not the training's.
    """

    def __init__(self, memory: MemoryMeter) -> None:
        from torch._dynamo.callback import callback_handler

        self._has_compiled = False
        self._memory = memory
        callback_handler.register_start_callback(self._begin)
        callback_handler.register_end_callback(lambda *_: memory.end_compiling())

    def _begin(self, *_: Any) -> None:
        self._has_compiled = True
        self._memory.begin_compiling()

    def take(self) -> bool:
        """Return True if torch has compiled since the last call."""
        has_compiled, self._has_compiled = self._has_compiled, False
        return has_compiled
