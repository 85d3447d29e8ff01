"""The key of a search's question: two commands with the same key ask the same, and the second continues the first."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from trainfast_runner.running.planning import RunPlan

MAX_HASHED_BYTES = 1 << 20
"""The content of a file this large is left out of the hash of a script's command: an interpreter, or data."""
KEY_DIGITS, FILES_DIGITS = 16, 8
"""Hex digits of the hash of a question, and of the files of a script's command."""


def key_of_question(parts: tuple[object, ...], plan: RunPlan) -> str:
    """Return the key of a question: a hash. A script's is `QUESTION.FILES`; an edit of its files changes only FILES."""
    if plan.script is None:
        return _hash_of(parts)
    question = _hash_of((*parts, plan.script.command, plan.cwd))
    return f"{question}.{_hash_of_files(plan.script.command, plan.cwd)}"


def _hash_of_files(words: Sequence[str], cwd: str) -> str:
    """Return a hash of the contents of a command's files: its script, and files named alone or after `=`."""
    contents = hashlib.sha256()
    names = [name for word in words for name in (word, word.partition("=")[2])]
    for name in names:
        path = os.path.join(cwd, name)
        with suppress(OSError):
            if os.path.isfile(path) and os.path.getsize(path) < MAX_HASHED_BYTES:
                contents.update(hashlib.sha256(Path(path).read_bytes()).digest())
    return contents.hexdigest()[:FILES_DIGITS]


def _hash_of(value: object) -> str:
    """Return a hash that differs for different values."""
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()[:KEY_DIGITS]
