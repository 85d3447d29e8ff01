"""A model without memory, and its weights initialized on the device a strategy chooses, block after block.

A model larger than a device can then start on several: no rank ever holds more of it than its own share and the part
being initialized. Each module is initialized by transformers' own `_init_weights` from a generator seeded by the run's
seed and the module's name, so that its values depend neither on the rank nor on the order.
"""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..invalid import InvalidInput
from ..levers import lora
from ..levers.blocks import outermost_blocks

USUAL_STD = 0.02
"""transformers' own default for `initializer_range`."""


@contextmanager
def without_weights() -> Iterator[None]:
    """Build models whose matrices have no memory: they are parameters on torch's `meta` device.

    Vectors (norms, biases) and buffers (rotary tables, position ids) keep the values of their constructors, which not
    every model can compute a second time; they are a thousandth of a model.
    """
    register = nn.Module.register_parameter

    def register_empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.dim() > 1 and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@dataclass(frozen=True)
class Part:
    """Modules of a model that are initialized at once: a block, or (`block` None) everything outside of the blocks."""

    block: nn.Module | None
    modules: list[nn.Module]


def parts(model: nn.Module) -> list[Part]:
    """Return everything outside of the blocks, then each block: together every module once."""
    blocks = [Part(block, list(block.modules())) for block in outermost_blocks(model)]
    inside = {id(module) for part in blocks for module in part.modules}
    return [Part(None, [module for module in model.modules() if id(module) not in inside]), *blocks]


def init_weights(model: nn.Module, seed: int, device: torch.device, modules: Iterable[nn.Module] | None = None) -> None:
    """Give the parameters of `modules` (None: of all of `model`) memory on `device`, and their initial values."""
    for _ in init_in_turn(model, seed, device, modules):
        pass


def init_in_turn(
    model: nn.Module, seed: int, device: torch.device, modules: Iterable[nn.Module] | None = None
) -> Iterator[Part]:
    """Yield the parts of `model`, each initialized only when the caller asks for it; of `modules` only, if given.

    The part outside of the blocks comes first: a model's own `_init_weights` may reach into its blocks, and must find
    no weights there yet.
    """
    wanted = None if modules is None else set(modules)
    for part in parts(model):
        if wanted is not None:
            part = Part(part.block, [module for module in part.modules if module in wanted])
        if part.modules:
            _init_part(model, seed, device, part.modules)
            yield part


@dataclass(frozen=True)
class _NamedModule:
    """A module, its full name, and the (sub)model whose `_init_weights` initializes it."""

    name: str
    module: nn.Module
    owner: Any


@torch.no_grad()
def _init_part(model: nn.Module, seed: int, device: torch.device, modules: list[nn.Module]) -> None:
    """Initialize the modules as those of a model without adapters, then their adapters; quantize what is to be."""
    layers = {id(layer): name for name, layer in lora.adapted_layers(model)}
    with lora.without_adapters(model):
        of_base = set(model.modules())
        _init_base(model, seed, device, [module for module in modules if module in of_base])
    for module in modules:
        if lora.awaits_quantization(module):
            lora.quantize(module)
        if id(module) in layers:
            torch.manual_seed(_seed(seed, f"{layers[id(module)]}.lora"))
            lora.init_adapter(module, device)


def _init_base(model: nn.Module, seed: int, device: torch.device, modules: list[nn.Module]) -> None:
    named_modules = list(_inner_first(model, "", model, set()))
    # The module that initializes each parameter: a tied weight has one, which may be in another part.
    initializer: dict[int, _NamedModule] = {}
    for named_module in named_modules:
        for parameter in _own(named_module.module).values():
            initializer.setdefault(id(parameter), named_module)
    parameters = {id(parameter): parameter for module in modules for parameter in _own(module).values()}
    initializing = {id(module) for module in modules} | {id(initializer[key].module) for key in parameters}
    empty_parameters = [parameter for parameter in parameters.values() if parameter.is_meta]
    for parameter in empty_parameters:
        # NaN marks a value that is not initialized, and would show in the loss.
        values = torch.full_like(parameter, torch.nan, device=device)
        # In place, so that a tied weight stays one parameter.
        torch.utils.swap_tensors(  # type: ignore[no-untyped-call]
            parameter, nn.Parameter(values, requires_grad=parameter.requires_grad)
        )
    for named_module in named_modules:
        if id(named_module.module) in initializing:
            with _tied_absent(named_module, initializer):
                torch.manual_seed(_seed(seed, named_module.name))
                named_module.owner._init_weights(named_module.module)
    # The rest as the module's own constructor does, or else as transformers does without a rule.
    for parameter in filter(_is_uninitialized, empty_parameters):
        named_module = initializer[id(parameter)]
        torch.manual_seed(_seed(seed, named_module.name))
        reset = getattr(named_module.module, "reset_parameters", None)
        if callable(reset):
            reset()
        if _is_uninitialized(parameter):
            parameter.normal_(0.0, getattr(named_module.owner.config, "initializer_range", USUAL_STD))


@contextmanager
def _tied_absent(named_module: _NamedModule, initializer: dict[int, _NamedModule]) -> Iterator[None]:
    """Take away the weights of `named_module` that another module initializes (tied ones)."""
    parameters = named_module.module._parameters
    tied_parameters = {
        key: p for key, p in _own(named_module.module).items() if initializer[id(p)].module is not named_module.module
    }
    for key, parameter in tied_parameters.items():
        parameters[key] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
    try:
        yield
    finally:
        parameters.update(tied_parameters)


def _inner_first(module: nn.Module, name: str, owner: Any, seen_ids: set[int]) -> Iterator[_NamedModule]:
    """Yield every module once, its children first: transformers' own order of initialization."""
    if id(module) in seen_ids:
        return
    seen_ids.add(id(module))
    owner = module if hasattr(module, "_init_weights") else owner
    for key, child in module.named_children():
        yield from _inner_first(child, f"{name}.{key}", owner, seen_ids)
    yield _NamedModule(name, module, owner)


def _own(module: nn.Module) -> dict[str, nn.Parameter]:
    """The module's own parameters, without those of its children."""
    return {key: parameter for key, parameter in module._parameters.items() if parameter is not None}


def _is_uninitialized(parameter: Tensor) -> bool:
    return bool(parameter.numel()) and bool(parameter.flatten()[0].isnan())


def _seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """Return `outermost_blocks`. Raises InvalidInput if the model has none."""
    blocks = outermost_blocks(model)
    if not blocks:
        raise InvalidInput(
            f"{type(model).__name__} has no list of layers to spread",
            key="strategy",
            allowed=["single", "ddp"],
            nearest="ddp",
        )
    return blocks
