"""The attention kernel: transformers' function by its name, and which of its own kernels torch's sdpa may take.

The choice is torch's process-wide flags, not `sdpa_kernel` around the forward: checkpointing computes attention again
in the backward. With one kernel allowed torch raises an error where it has no such kernel for the model's tensors.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..catalog import ATTENTION_IMPLEMENTATIONS
from ..spec import Knobs

_FLAGS = {"sdpa-flash": "flash", "sdpa-cudnn": "cudnn", "sdpa-efficient": "mem_efficient", "sdpa-math": "math"}
"""Name of each kernel of sdpa in torch's flags; a torch without one has no flag for it."""
_NODES = {
    "sdpa-flash": "ScaledDotProductFlash",
    "sdpa-cudnn": "ScaledDotProductCudnn",
    "sdpa-efficient": "ScaledDotProductEfficient",
    "sdpa-math": "SafeSoftmax",
}
"""Beginning of the name of each kernel's backward, such as `ScaledDotProductFlashAttentionForCpuBackward0`."""


def choose(model: nn.Module, knobs: Knobs) -> None:
    """Allow sdpa the kernel that the knob names, or every kernel; note the one that the first forward takes."""
    chosen = knobs.attention if knobs.attention in _FLAGS else None
    for kernel, name in _FLAGS.items():
        if (enable := getattr(torch.backends.cuda, f"enable_{name}_sdp", None)) is not None:
            enable(chosen in (None, kernel))
    if knobs.compile == "off":
        # A hook in a compiled module would be compiled into it, and a compiled graph does not name its kernels.
        live: Any = model
        live._first_forward = model.register_forward_hook(lambda _replica, _inputs, output: _see(live, output))


def _see(model: Any, output: Any) -> None:
    model._first_forward.remove()
    outputs = list(output.values()) if isinstance(output, dict) else [output]
    nodes = [value.grad_fn for value in outputs if isinstance(value, Tensor) and value.grad_fn is not None]
    seen = set(nodes)
    names: set[str] = set()
    while nodes:
        node = nodes.pop()
        names.add(node.name())
        following = {inner for inner, _ in node.next_functions if inner is not None} - seen
        seen |= following
        nodes += following
    kernels = [kernel for kernel, word in _NODES.items() if any(name.startswith(word) for name in names)]
    model._seen_kernel = "+".join(kernels) or None


def actual(model: nn.Module) -> dict[str, Any]:
    """Return `attention_kernel`, of sdpa by the autograd graph of the first forward, else by the flags.

    None before a forward, and of a compiled model, if sdpa may choose.
    """
    implementation = getattr(model.config, "_attn_implementation", None) or ""
    if implementation != "sdpa":
        kernel = next((name for name, its in ATTENTION_IMPLEMENTATIONS.items() if its == implementation), None)
    elif (kernel := getattr(model, "_seen_kernel", None)) is None:
        allowed = [kernel for kernel, name in _FLAGS.items() if _is_allowed(name)]
        kernel = allowed[0] if len(allowed) == 1 else None
    return {"attention_kernel": kernel}


def _is_allowed(name: str) -> bool:
    is_enabled = getattr(torch.backends.cuda, f"{name}_sdp_enabled", None)
    return is_enabled is not None and bool(is_enabled())
