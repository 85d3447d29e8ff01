"""The C++ extensions that DeepSpeed compiles when a run first needs them: their directory and build tools."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from trainfast_runner.records.home import cache_directory

USES_LIBAIO = b"#include <libaio.h>\nint main() { return io_submit(0, 0, 0); }\n"

COMPILED_WITHIN_S = 30.0
"""Chosen, not measured: a compiler that takes longer for two lines counts as failed."""


def extensions_directory(python: str, versions: Mapping[str, str | None]) -> Path:
    """One directory for each training Python and its versions: elsewhere torch would build the same name again.

    It lies below TORCH_EXTENSIONS_DIR if that is set, but is never that itself, where a user's own script may build.
    """
    names = [f"{name}{versions.get(name)}" for name in ("torch", "deepspeed")]
    configured = os.environ.get("TORCH_EXTENSIONS_DIR")
    base = Path(configured) / "trainfast" if configured else cache_directory() / "extensions"
    return base / "-".join([*names, hashlib.sha256(python.encode()).hexdigest()[:8]])


def search_path(python: str) -> str:
    """PATH as a launch sets it: the training Python's own folder, where pip puts ninja, comes first."""
    return os.pathsep.join([os.path.dirname(python), os.environ.get("PATH", os.defpath)])


def compiler(python: str) -> str | None:
    """The C++ compiler torch will call, or None; torch calls no other in place of an empty CXX."""
    command = os.environ.get("CXX", "c++").split()
    return shutil.which(command[0], path=search_path(python)) if command else None


def missing_tool(python: str) -> tuple[str, str] | None:
    """The first missing build tool, and the command that installs it; None if all are there."""
    if compiler(python) is None:
        return "a C++ compiler", "apt-get install g++"
    if shutil.which("ninja", path=search_path(python)) is None:
        return "ninja", f"{python} -m pip install ninja"
    return None


def has_libaio(python: str) -> bool:
    """True if a program with libaio's header compiles and links, as DeepSpeed's async_io must."""
    compiler_path = compiler(python)
    if compiler_path is None:
        return False
    try:
        result = subprocess.run(
            [compiler_path, "-x", "c++", "-", "-o", os.devnull, "-laio"],
            input=USES_LIBAIO,
            capture_output=True,
            timeout=COMPILED_WITHIN_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return result.returncode == 0
