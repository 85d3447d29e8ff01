"""Floating-point operations of one sample's forward and backward, counted from the model and its configuration."""

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..levers.blocks import outermost_blocks
from ..shared.words import split_tokens
from .model_config import active_share, head_size, image_part, patches, text_part, tokens_per_sample

_ADDED = re.compile(r"(^|\.)(position_embeddings|cls_token|mask_token|distillation_token)$")
"""Parameters that are added, never multiplied."""
_ONE_TOKEN = re.compile(r"(^|\.)(pooler|classifier)\.")
"""Heads that look at one token of a sample."""
_ENCODER = re.compile(r"(^|\.)encoder\.")
"""Parameters of an encoder, which multiply the encoder's tokens."""
_CROSS_KEYS = re.compile(r"\.(EncDecAttention\.[kv]|encoder_attn\.[kv]_proj)\.")
"""Parameters of a decoder that multiply the encoder's tokens."""


@dataclass(frozen=True)
class SampleFlops:
    """FLOPs of a sample."""

    model: float
    recomputed: float
    """Those of activations computed again, on top of `model`."""
    notebook: float | None
    """Those by the formula of the "Transformers Benchmarks" notebook, for BERT and GPT-2; None for other models, and
    with frozen parameters."""


@dataclass(frozen=True)
class _Shape:
    """Layers and tokens of a sample; zeros for the decoder of a model without one of its own."""

    layers: int
    tokens: int
    decoder_layers: int = 0
    decoder_tokens: int = 0

    @property
    def scores(self) -> int:
        """Pairs of tokens that attend to each other, summed over all layers."""
        self_attention = self.layers * self.tokens**2 + self.decoder_layers * self.decoder_tokens**2
        return self_attention + self.decoder_layers * self.decoder_tokens * self.tokens


def flops_per_sample(
    model: nn.Module, objective: str, seq_len: int, checkpointed_share: float, *, recomputes_logits: bool = False
) -> SampleFlops | None:
    """Count the FLOPs of one sample; None if the configuration lacks a field. Call it before the model is sharded.

    Per token 6N + 6*L*H*(d_qk + d_v)*s (torchtitan's formula; PaLM, appendix B, where d_qk = d_v). Frozen parameters
    cost 4, not 6: forward and the gradient of the input. N counts the parameters that multiply that token: not the
    input embeddings, whose lookup is free, unless they are tied to the output projection; only the active share of a
    mixture's experts. An encoder's parameters multiply the encoder's
    tokens, a decoder's its own. Attention is counted whole, without halving for causality. Checkpointing repeats
    the forward of its share of the layers, a third of their FLOPs, and a chunked loss the head's. (torch leaves out a
    layer's last product if no later value needs it, such as a Llama's down projection.)
    """
    config: Any = model.config
    part = image_part(config) if objective == "image-classification" else text_part(config)
    layers, heads, hidden = (
        getattr(part, name, None) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    if not (isinstance(layers, int) and isinstance(heads, int) and isinstance(hidden, int)):
        return None
    if objective == "image-classification" and patches(config) is None:
        return None
    shape = _shape(config, part, layers, objective, seq_len)
    everywhere, in_layers, trained = _multiplications(model, part, shape)
    attention = 6.0 * heads * 2 * head_size(part) * shape.scores
    head = 2.0 * hidden * int(part.vocab_size) * (shape.decoder_tokens or shape.tokens) if recomputes_logits else 0.0
    notebook = None
    if objective in ("causal-lm", "masked-lm") and trained == everywhere:
        notebook = (3 + checkpointed_share) * notebook_forward(layers, hidden, seq_len, int(part.vocab_size))
    return SampleFlops(
        model=4.0 * everywhere + 2.0 * trained + attention,
        recomputed=checkpointed_share * (6.0 * in_layers + attention) / 3 + head,
        notebook=notebook,
    )


def notebook_forward(layers: int, hidden: int, seq_len: int, vocab: int) -> float:
    """Forward FLOPs of a sample by the formula of the "Transformers Benchmarks" notebook for BERT and GPT-2."""
    attention = 4 * hidden * seq_len**2 + 8 * seq_len * hidden**2
    return float(layers * (attention + 16 * seq_len * hidden**2) + 2 * seq_len * hidden * vocab)


def _shape(config: Any, part: Any, layers: int, objective: str, seq_len: int) -> _Shape:
    if objective == "image-classification":
        return _Shape(layers, tokens_per_sample(config, objective, seq_len))
    if objective == "seq2seq":
        read, written = split_tokens(seq_len)
        decoders = (getattr(part, name, None) for name in ("num_decoder_layers", "decoder_layers"))
        decoder = next((count for count in decoders if isinstance(count, int)), layers)
        return _Shape(layers, read, decoder, written)
    return _Shape(layers, seq_len)


def _multiplications(model: nn.Module, part: Any, shape: _Shape) -> tuple[float, float, float]:
    """Return sums of parameter size x tokens multiplied: over all parameters, those of the layers, and the trained."""
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    find: Any = getattr(model, "get_output_embeddings", None)
    output = find() if find else None
    looked_up.discard(id(getattr(output, "weight", None)))
    active = active_share(part)
    layered = {id(parameter) for block in outermost_blocks(model) for parameter in block.parameters()}
    total = in_layers = trained = 0.0
    for name, parameter in model.named_parameters():
        if id(parameter) in looked_up or _ADDED.search(name):
            continue
        share = active if ".experts." in name else 1.0
        multiplied = parameter.numel() * share * _tokens(name, shape)
        total += multiplied
        in_layers += multiplied if id(parameter) in layered else 0.0
        trained += multiplied if parameter.requires_grad else 0.0
    return total, in_layers, trained


def _tokens(name: str, shape: _Shape) -> int:
    if _ONE_TOKEN.search(name):
        return 1
    if shape.decoder_layers and not _ENCODER.search(name) and not _CROSS_KEYS.search(name):
        return shape.decoder_tokens
    return shape.tokens
