"""Texts, and the cache of their token ids.

An entry of the cache is a directory named by a hash of everything it depends on: `ids.bin` (the ids, little-endian
uint16 or uint32), `lengths.bin` (the tokens of each text, little-endian uint32), `meta.json`, and `tokenizer.json`
where the tokenizer was trained here. It appears by rename, under a file lock, so that ranks and runs that start
together make it once.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..invalid import InvalidInput, one_line
from ..shared.host import make_private, wait_for_lock

ENTRY_VERSION = 3
"""The version of an entry, a part of its key: entries of another version are made again."""
TEXT_LIMIT_BYTES = 8_000_000
"""Chosen, not measured: the most bytes that are read of the standard library's sources."""
VOCAB_LIMIT = 8192
"""Chosen, not measured: the largest vocabulary of a tokenizer that is trained here."""
KEY_DIGITS = 20
"""Hex digits of the hash in an entry's name."""
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
"""Folders of the standard library that are left out."""


@dataclass(frozen=True)
class CorpusRequest:
    """Texts and their tokenizer; None trains a byte-level BPE on the texts themselves.

    A text is a document, or with `lines` each of its lines that is not empty.
    """

    kind: str
    paths: list[str]
    vocab: int
    tokenizer: str | None = None
    name: str | None = None
    split: str = "train"
    lines: bool = False


@dataclass(frozen=True)
class Corpus:
    """An entry of the cache. `sections` are (first token, label) of each run of text from one source."""

    folder: Path
    source: str
    dtype: str
    tokens: int
    vocab_size: int
    mask_id: int | None
    special_ids: list[int]
    sections: list[tuple[int, int]]


def stdlib_files() -> list[Path]:
    """Sources of the running interpreter's standard library without its tests, in a fixed order, up to 8 MB."""
    root = Path(sysconfig.get_paths()["stdlib"])
    chosen_files: list[Path] = []
    total = 0
    for path in sorted(root.rglob("*.py")):
        if _SKIPPED.isdisjoint(path.relative_to(root).parts) and path.is_file():
            total += path.stat().st_size
            if total > TEXT_LIMIT_BYTES:
                break
            chosen_files.append(path)
    if not chosen_files:
        raise InvalidInput(
            f"this Python has no sources of its standard library in {root}; use data.kind = 'files' or 'random'",
            key="data.kind",
            allowed=["files", "hub", "random"],
        )
    return chosen_files


def open_corpus(
    request: CorpusRequest, cache_dir: Path, build: Callable[[Path], None], on_wait: Callable[[str], None] = print
) -> Corpus:
    """Return the cache's entry for `request`; `build(folder)` makes a missing one, `on_wait` as for `make_once`."""
    folder = cache_dir / "tokens" / _key(request)
    make_once(folder, "meta.json", build, on_wait)
    meta = json.loads((folder / "meta.json").read_text())
    return Corpus(folder=folder, **{**meta, "sections": [tuple(section) for section in meta["sections"]]})


def make_once(folder: Path, last_file: str, make: Callable[[Path], None], on_wait: Callable[[str], None]) -> None:
    """Have `make` fill the folder unless its `last_file` is there. Other processes wait until the folder is whole.

    `on_wait` is called with the process that makes it, in words, once that wait takes over a second.
    """
    if (folder / last_file).is_file():
        return
    make_private(folder.parent)
    with open(folder.with_suffix(".lock"), "w") as lock:
        wait_for_lock(lock.fileno(), fcntl.LOCK_EX, lambda holder: on_wait(f"waiting for {holder}") if holder else None)
        if (folder / last_file).is_file():
            return
        for left_behind in folder.parent.glob(f"{folder.name}.*.tmp"):
            shutil.rmtree(left_behind, ignore_errors=True)
        half_made = folder.with_suffix(f".{os.getpid()}.tmp")
        half_made.mkdir(mode=0o700)
        try:
            make(half_made)
            shutil.rmtree(folder, ignore_errors=True)
            half_made.rename(folder)
        finally:
            shutil.rmtree(half_made, ignore_errors=True)


def describe(request: CorpusRequest) -> str:
    """The source in words, for the record and the screen."""
    if request.kind == "text":
        return f"Python {sys.version_info.major}.{sys.version_info.minor} standard library sources"
    if request.kind == "hub":
        return f"Hub dataset {request.name}, split {request.split}"
    return f"{len(request.paths)} text file{'s' if len(request.paths) != 1 else ''}"


def texts(request: CorpusRequest) -> Iterator[tuple[str, int]]:
    """Yield each text of a request and its label."""
    for document, label in documents(request):
        if not request.lines:
            yield document, label
            continue
        for line in document.splitlines():
            if line.strip():
                yield line, label


def documents(request: CorpusRequest) -> Iterator[tuple[str, int]]:
    """Yield each document and its label.

    The label is the number of the document's folder (for `text` the first part of the path), for `hub` the row's own.
    """
    if request.kind == "hub":
        yield from _hub_documents(request)
        return
    if request.kind == "text":
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [(path, path.relative_to(root).parts[0]) for path in stdlib_files()]
    else:
        files = [(Path(path), str(Path(path).parent)) for path in request.paths]
    groups: dict[str, int] = {}
    for path, group in files:
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise InvalidInput(f"{path}: {error.strerror}", key="data.paths") from error
        if text:
            yield text, groups.setdefault(group, len(groups))


def _hub_documents(request: CorpusRequest) -> Iterator[tuple[str, int]]:
    try:
        import datasets
    except ImportError as error:
        raise InvalidInput(
            f"data.kind = 'hub' needs the package datasets: {sys.executable} -m pip install datasets",
            key="data.kind",
            allowed=["text", "files", "random"],
        ) from error
    try:
        rows: Any = datasets.load_dataset(request.name, split=request.split)
    except Exception as error:
        message = f"the Hub dataset {request.name} could not be loaded: {one_line(error)}"
        raise InvalidInput(message, key="data.name") from error
    if not len(rows):
        raise InvalidInput(f"{request.name} has no rows in its split {request.split}", key="data.split")
    column = next((name for name in rows.column_names if isinstance(rows[0][name], str)), None)
    if column is None:
        raise InvalidInput(f"{request.name} has no column of text among {rows.column_names}", key="data.name")
    for row in rows:
        label = row.get("label", 0)
        if row[column]:
            yield row[column], label if isinstance(label, int) else 0


def _key(request: CorpusRequest) -> str:
    parts: dict[str, Any] = {"format": ENTRY_VERSION, **asdict(request)}
    if request.kind == "text":
        parts["python"] = [sys.version, sysconfig.get_paths()["stdlib"], TEXT_LIMIT_BYTES]
    if request.kind == "files":
        if not request.paths:
            raise InvalidInput("data.kind = 'files' names no file", key="data.paths")
        parts["paths"] = [_stamp(Path(path)) for path in request.paths]
    if request.tokenizer is not None and Path(request.tokenizer).is_dir():
        parts["tokenizer_files"] = [
            _stamp(path) for path in sorted(Path(request.tokenizer).glob("*")) if path.is_file()
        ]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode())
    return f"{request.kind}-{digest.hexdigest()[:KEY_DIGITS]}"


def _stamp(path: Path) -> list[Any]:
    try:
        status = path.stat()
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}", key="data.paths") from error
    if not path.is_file():
        raise InvalidInput(f"{path} is not a file", key="data.paths")
    return [str(path), status.st_size, status.st_mtime_ns]
