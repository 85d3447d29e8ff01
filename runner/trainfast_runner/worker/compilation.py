"""The `compile` knob: torch.compile of the module whose forward the loop calls, and which steps paid for it."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .invalid import InvalidInput
from .spec import Knobs

COMPILERS = {"cpu": ("CXX", ("g++",), "g++"), "cuda": ("CC", ("gcc", "cc", "clang"), "gcc")}
"""By device: the variable that names the compiler, the names it is looked for under, and the Debian package."""


def compiled(module: nn.Module, knobs: Knobs, device: torch.device) -> nn.Module:
    """`module` as the knob asks. A wrapped module is compiled with its wrapper, so that DDP's buckets still overlap
    with the backward (torch splits the graph at them)."""
    if knobs.compile == "off":
        return module
    check_compiler(knobs, device)
    mode = mode_of(knobs)
    made: Any = torch.compile(module, mode=mode)
    if mode == "max-autotune":
        # It replays CUDA graphs, which reuse the memory of the step before.
        made.register_forward_pre_hook(lambda *_: torch.compiler.cudagraph_mark_step_begin())  # type: ignore[no-untyped-call]
    inner: nn.Module = made
    return inner


def mode_of(knobs: Knobs) -> str | None:
    """torch.compile's `mode`. Gradients that a CUDA graph made are gone when it is replayed (torch/_inductor,
    cudagraph_trees.py), so that none can be accumulated over micro-batches: then it is tuned alike, without graphs."""
    if knobs.compile == "default":
        return None
    return "max-autotune-no-cudagraphs" if knobs.grad_accum > 1 else knobs.compile


def bare(module: nn.Module) -> nn.Module:
    """What torch.compile was given, or `module` itself."""
    inner: nn.Module = getattr(module, "_orig_mod", module)
    return inner


def check_compiler(knobs: Knobs, device: torch.device) -> None:
    """Raise InvalidInput, with the package to install, where there is nothing to compile kernels with."""
    variable, names, package = COMPILERS[device.type]
    wanted = os.environ.get(variable)
    if not any(shutil.which(name) for name in ((wanted,) if wanted else names)):
        raise InvalidInput(
            f"compile={knobs.compile} needs a compiler on PATH ({wanted or ', '.join(names)}); install with: "
            f"apt install {package}",
            "compile",
            ["off"],
            "off",
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise InvalidInput(
            f"compile={knobs.compile} builds against {header}, which is not there; install with: "
            f"apt install python{version}-dev",
            "compile",
            ["off"],
            "off",
        )


class CompileWatch:
    """Says of each step whether torch compiled anything in it, a recompilation or a late backward included."""

    def __init__(self) -> None:
        from torch._dynamo.callback import callback_handler

        self._seen = False
        callback_handler.register_start_callback(self._see)

    def _see(self, *_: Any) -> None:
        self._seen = True

    def take(self) -> bool:
        """Whether since the last call."""
        seen, self._seen = self._seen, False
        return seen
