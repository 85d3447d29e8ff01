"""Cut a transformers model into pipeline stages: slices of its own layer list, run by its own forward.

A stage is the model without the layers of the other stages. Modules that pass their input on replace the embedding on
all but the first stage, and the final norm and the head on all but the last. The model's own code makes masks,
positions and rotary tables on every stage. torch's `pipeline()` export is not used: it drops activation checkpointing
and unties tied embeddings.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..invalid import InvalidInput
from ..model.model_config import active_share, head_size
from .balance import balance


class _PassOn(nn.Module):
    """Replaces an embedding: its output came from the stage before."""

    def forward(self, inputs_embeds: Tensor, **_unused: Any) -> Tensor:
        return inputs_embeds


class _NothingToAdd(nn.Module):
    """Replaces a position table that the first stage has already added."""

    def forward(self, position_ids: Tensor) -> Tensor:
        return torch.zeros((), device=position_ids.device)


Replacement = Callable[[], nn.Module] | None
"""Makes the module that replaces one of another stage; None if nothing replaces it."""


@dataclass(frozen=True)
class Layout:
    """The parts of a model family that a pipeline divides, by their full names."""

    layers: str
    entry: dict[str, Replacement]
    """Modules for the first stage only."""
    exit: dict[str, Replacement]
    """Modules for the last stage only."""
    heads: tuple[str, ...]
    """Endings of the names of the classes that have this layout."""


_LLAMA = Layout(
    "model.layers",
    {"model.embed_tokens": None},
    {"model.norm": nn.Identity, "lm_head": None},
    ("ForCausalLM",),
)
LAYOUTS: dict[str, Layout] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen3": _LLAMA,
    "mixtral": _LLAMA,
    "gpt2": Layout(
        "transformer.h",
        {"transformer.wte": None, "transformer.wpe": _NothingToAdd, "transformer.drop": nn.Identity},
        {"transformer.ln_f": nn.Identity, "lm_head": None},
        ("LMHeadModel",),
    ),
    "bert": Layout(
        "bert.encoder.layer",
        {"bert.embeddings": _PassOn},
        {"bert.pooler": None, "cls": None, "dropout": None, "classifier": None},
        ("ForMaskedLM", "ForSequenceClassification"),
    ),
}
"""The layouts that can be cut into stages, by `model_type`."""


class StageModule(nn.Module):
    """One stage: takes token ids or hidden states, returns hidden states, or logits on the last."""

    def __init__(self, model: nn.Module, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.model = model
        self.is_first = is_first
        self.is_last = is_last
        self.autocast: Callable[[], AbstractContextManager[Any]] = nullcontext

    def forward(self, inputs: Tensor) -> Tensor:
        """`(batch, seq)` or `(batch, seq, hidden)` to `(batch, seq, hidden)` or logits."""
        name = "input_ids" if self.is_first else "inputs_embeds"
        model: Any = self.model
        with self.autocast():
            if self.is_last:
                logits: Tensor = model(**{name: inputs}).logits
                return logits
            hidden: Tensor = model.base_model(**{name: inputs}).last_hidden_state
            return hidden


@dataclass(frozen=True)
class Cut:
    """A model with its layers divided: stage s has layers `bounds[s]` up to `bounds[s + 1]`."""

    model: nn.Module
    layout: Layout
    bounds: tuple[int, ...]

    @property
    def stage_count(self) -> int:
        """Number of stages."""
        return len(self.bounds) - 1

    def tied(self) -> list[nn.Parameter]:
        """Parameters that both the first and the last stage have: tied embeddings."""
        first_ids = {id(parameter) for parameter in _parameters(self._parts(self.layout.entry))}
        return [parameter for parameter in _parameters(self._parts(self.layout.exit)) if id(parameter) in first_ids]

    def stage(self, index: int) -> StageModule:
        """Make stage `index`, which shares its parameters with the whole model."""
        is_first, is_last = index == 0, index == self.stage_count - 1
        begin, end = self.bounds[index], self.bounds[index + 1]
        layers = _module_at(self.model, self.layout.layers)
        assert isinstance(layers, nn.ModuleList)
        shared_modules = [*layers, *self._parts(self.layout.entry), *self._parts(self.layout.exit)]
        # Modules in the memo are not copied: only the frame around the layers is new.
        frame = copy.deepcopy(self.model, {id(module): module for module in shared_modules})
        _put_module(frame, self.layout.layers, nn.ModuleList(list(layers)[begin:end]))
        for is_left_out, replacements in ((not is_first, self.layout.entry), (not is_last, self.layout.exit)):
            for path, replacement in replacements.items() if is_left_out else ():
                if _module_at(frame, path) is not None:
                    _put_module(frame, path, replacement() if replacement else None)
        config: Any = frame.config
        if getattr(config, "layer_types", None):
            # Indexed by the position in the layer list; set without the configuration's check of its length.
            config.__dict__["layer_types"] = config.layer_types[begin:end]
        return StageModule(frame, is_first=is_first, is_last=is_last)

    def _parts(self, replacements: dict[str, Replacement]) -> list[nn.Module]:
        parts = [_module_at(self.model, path) for path in replacements]
        return [module for module in parts if module is not None]


def cut(model: nn.Module, stage_count: int, seq_len: int) -> Cut:
    """Divide `model` into `stage_count` stages of about equal FLOPs.

    Raises InvalidInput for a family without a layout, and for fewer layers than stages.
    """
    config: Any = model.config
    layout, head = LAYOUTS.get(config.model_type), type(model).__name__
    if layout is None:
        raise InvalidInput(
            f"a pipeline can be cut from {', '.join(sorted(LAYOUTS))}, not from {config.model_type}",
            key="strategy",
            allowed=["single", "ddp", "fsdp"],
            nearest="fsdp",
        )
    if not head.endswith(layout.heads):
        raise InvalidInput(
            f"a pipeline can be cut from {config.model_type} with the head {' or '.join(layout.heads)}, not {head}",
            key="data.objective",
        )
    layers = _module_at(model, layout.layers)
    assert isinstance(layers, nn.ModuleList)
    if stage_count > len(layers):
        raise InvalidInput(
            f"{stage_count} pipeline stages are more than the model's {len(layers)} layers",
            key="pp_degree",
            allowed=[f"up to {len(layers)} stages"],
        )
    whole = Cut(model, layout, (0, len(layers)))
    head_cost = sum(_multiplied(part, config) for part in whole._parts(layout.exit))
    if head.endswith("ForSequenceClassification"):
        # This head reads one token of a sample.
        head_cost /= seq_len
    costs = [_multiplied(layer, config) + _scores(config, seq_len) for layer in layers]
    return Cut(model, layout, balance(costs, head_cost, stage_count))


def _multiplied(module: nn.Module, config: Any) -> float:
    """Parameters that multiply a token, a sixth of its training FLOPs; only the active share of experts."""
    active = active_share(config)
    return sum(p.numel() * (active if ".experts." in name else 1.0) for name, p in module.named_parameters())


def _scores(config: Any, seq_len: int) -> float:
    """Cost of attention's own products in the same unit: H * (d_qk + d_v) * s per token and layer (torchtitan)."""
    return float(config.num_attention_heads * 2 * head_size(config) * seq_len)


def _parameters(modules: list[nn.Module]) -> list[nn.Parameter]:
    return [parameter for module in modules for parameter in module.parameters()]


def _module_at(model: nn.Module, path: str) -> nn.Module | None:
    part: Any = model
    for name in path.split("."):
        part = getattr(part, name, None)
    return part if isinstance(part, nn.Module) else None


def _put_module(model: nn.Module, path: str, module: nn.Module | None) -> None:
    parent, _, name = path.rpartition(".")
    owner = _module_at(model, parent) if parent else model
    assert owner is not None
    owner._modules[name] = module
