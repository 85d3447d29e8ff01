"""Names, limits and plans that the runner and the training process share. Standard library only.

The parent reads this file as `trainfast_runner.worker.shared_tables`, the worker as `trainfast_worker.shared_tables`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

CONTROL_FILE = "control.jsonl"
"""The parent's orders to a warm process, in the run directory."""
PROBE, CONFIRMATION = "probe", "proof"
"""Roles of a batch search's runs: the process in which it tries batch sizes, and the run that confirms one."""
TRIAL = "trial"
"""Role of a best-fit search's warm process, which tries many candidates, or of a script's run, which tries one."""
STEP_PHASES = ("data", "forward", "backward", "optimizer", "other")
"""Phases of a step, in their order; `other` is the remainder."""
MEMORY_PHASES = ("forward_backward", "optimizer")
"""The phases of a step whose peaks are measured apart, as in a step record's `phase_peaks`."""

TRACED_CATEGORIES = ("params", "grads", "optimizer", "activations", "temporary")
"""Categories of the live bytes of a trace, which is of one process that shares nothing."""
PARAMS, GRADS, OPTIMIZER, ACTIVATIONS, TEMPORARY = range(len(TRACED_CATEGORIES))
NO_WORK = (0.0, 0.0, 0.0)
"""Calls of operations, FLOPs, bytes moved."""
TRACED_MICRO_BATCHES = 2
"""Micro-batches of a trace: in the second, gradients are alive from its start, as in all but the first."""

DATA_KINDS = ("text", "files", "hub", "random", "jpeg")
TRAINING_OBJECTIVES = ("causal-lm", "masked-lm", "sequence-classification", "seq2seq", "image-classification")
DATA_SAMPLES = ("packed", "documents", "lines")
SMALLEST_VOCAB = 300
"""256 bytes and the special tokens leave little room for merges below this."""
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
"""The objectives with which each family can be cut into stages; the cuts are in `strategies/pipeline_stages.py`."""


def search_lock(run_directory: Path, search_id: str) -> Path:
    """The lock that a search's conductor holds; the directories of searches stand beside those of runs."""
    return run_directory.parent.parent / "searches" / search_id / "search.lock"
