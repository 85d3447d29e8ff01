"""The `compile` knob: torch.compile of the module whose forward the loop calls, and the steps that compiled."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from ..invalid import InvalidInput
from ..spec import Knobs


def compiled(module: nn.Module, knobs: Knobs) -> nn.Module:
    """Compile `module` if the knob asks for it, with its wrapper.

    torch splits the graph at DDP's buckets, so that they still overlap with the backward.
    """
    if knobs.compile == "off":
        return module
    check_header(knobs)
    mode = mode_of(knobs)
    compiled_module = cast(nn.Module, torch.compile(module, mode=mode))
    if mode == "max-autotune":
        # CUDA graphs are replayed, and reuse the memory of the last step.
        compiled_module.register_forward_pre_hook(lambda *_: torch.compiler.cudagraph_mark_step_begin())  # type: ignore[no-untyped-call]
    return compiled_module


def mode_of(knobs: Knobs) -> str | None:
    """torch.compile's `mode`, without CUDA graphs if gradients accumulate over micro-batches.

    A replay of a CUDA graph overwrites the gradients of the last one (torch/_inductor, cudagraph_trees.py).
    """
    if knobs.compile == "default":
        return None
    return "max-autotune-no-cudagraphs" if knobs.grad_accum > 1 else knobs.compile


def unwrap(module: nn.Module) -> nn.Module:
    """Take off torch.compile's wrapper, if there is one."""
    unwrapped: nn.Module = getattr(module, "_orig_mod", module)
    return unwrapped


def check_header(knobs: Knobs) -> None:
    """Raise InvalidInput, naming the package to install, if this Python has no header to compile kernels against."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise InvalidInput(
            f"compile={knobs.compile} builds against {header}, which is not there; install with: "
            f"apt-get install python{version}-dev",
            key="compile",
            allowed=["off"],
            nearest="off",
        )


class CompileWatch:
    """Notes whether torch compiled anything during a step, also a recompilation or a late backward."""

    def __init__(self) -> None:
        from torch._dynamo.callback import callback_handler

        self._has_compiled = False
        callback_handler.register_start_callback(self._see)

    def _see(self, *_: Any) -> None:
        self._has_compiled = True

    def take(self) -> bool:
        """Return True if torch has compiled since the last call."""
        has_compiled, self._has_compiled = self._has_compiled, False
        return has_compiled
