"""The model families that can be cut into tensor slices or pipeline stages, and their plans."""

from __future__ import annotations

from collections.abc import Mapping

OUR_TENSOR_PLANS: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "h.*.attn.c_attn": "packed_colwise",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
    "bert": {
        "encoder.layer.*.attention.self.query": "colwise",
        "encoder.layer.*.attention.self.key": "colwise",
        "encoder.layer.*.attention.self.value": "colwise",
        "encoder.layer.*.attention.output.dense": "rowwise",
        "encoder.layer.*.intermediate.dense": "colwise",
        "encoder.layer.*.output.dense": "rowwise",
    },
}
"""Plans of tensor parallelism for families without one in transformers; the styles are transformers' own names."""
TENSOR_STYLES = {
    "colwise",
    "rowwise",
    "packed_colwise",
    "moe_tp_experts",
    "replicated_with_grad_allreduce",
    "colwise_gather_output",
    "colwise_rep",
}
"""Ways of cutting a layer that `strategies/tensor_plan.py` has, by transformers' names."""
PIPELINE_OBJECTIVES: Mapping[str, tuple[str, ...]] = {
    "llama": ("causal-lm",),
    "mistral": ("causal-lm",),
    "qwen3": ("causal-lm",),
    "mixtral": ("causal-lm",),
    "gpt2": ("causal-lm",),
    "bert": ("masked-lm", "sequence-classification"),
}
"""The objectives with which each family can be cut into stages; the cuts are in `strategies/pipeline.py`."""
