"""Build DeepSpeed's extensions in one process at a time, also after a killed build that left its lock."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..shared.lock_files import wait_for_lock
from ..shared.private_folder import make_private

REASON_CHARACTERS = 100
"""Chosen, not measured: the most that a reason quotes of a compiler's error, which output.log has whole."""


def build_failure(builder: str, enter_phase: Callable[[str, str], None]) -> str | None:
    """Build or load one of DeepSpeed's extensions; return the reason for a failure, None on success.

    A build, or the wait for another rank's, is a phase of its own.
    """
    from deepspeed.ops import op_builder

    # torch takes an empty CXX as it is.
    compiler = os.environ.get("CXX", "c++").split()
    if not compiler or not shutil.which(compiler[0]) or not shutil.which("ninja"):
        reason = "no C++ compiler or no ninja on PATH"
        print(f"deepspeed: {builder}: {reason}", file=sys.stderr)
        return reason
    try:
        extension = getattr(op_builder, builder)()
        if not _is_built(extension.name):
            enter_phase("compile", f"{builder.removesuffix('Builder')} of DeepSpeed, once for this Python")
        with build_lock(extension.name):
            extension.load(verbose=False)
    except Exception as error:
        print(f"deepspeed: {builder}: {error}", file=sys.stderr)
        first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        return f"the build of {builder} failed ({first_line[:REASON_CHARACTERS]}; more in output.log)"
    return None


def _is_built(extension: str) -> bool:
    """True if TORCH_EXTENSIONS_DIR has the extension's library (torch.utils.cpp_extension)."""
    directory = os.environ.get("TORCH_EXTENSIONS_DIR")
    return bool(directory) and Path(directory or "", extension, f"{extension}.so").exists()


@contextmanager
def build_lock(extension: str) -> Iterator[None]:
    """Wait for any running build in TORCH_EXTENSIONS_DIR, a folder of ours alone, and lock it for `extension`.

    A lock file of torch's that is there now was left by a killed build, and torch would wait for it for ever.
    """
    directory = os.environ.get("TORCH_EXTENSIONS_DIR")
    if not directory:
        yield
        return
    folder = Path(directory)
    make_private(folder)
    fd = os.open(folder / "builder.flock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        wait_for_lock(fd, fcntl.LOCK_EX)
        (folder / extension / "lock").unlink(missing_ok=True)
        yield
    finally:
        os.close(fd)
