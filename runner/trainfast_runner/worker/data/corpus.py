"""Texts, and the cache of their token ids.

An entry of the cache is a directory named by a hash of everything it depends on: `ids.bin` (the ids, little-endian
uint16 or uint32), `lengths.bin` and `labels.bin` (the tokens and the label of each text, little-endian int64),
`meta.json`, and `tokenizer.json` where the tokenizer was trained here. It appears by rename, under a file lock, so that
ranks and runs that start together make it once. The text is tokenized in a process of its own, so that its hundreds of
MB are not in the training's memory baseline.
"""

import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from ..invalid import InvalidInput, one_line
from ..shared.host import make_private, wait_for_lock

ENTRY_VERSION = 4
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

    @property
    def source(self) -> str:
        """The source in words, for the record and the screen."""
        if self.kind == "text":
            return f"Python {sys.version_info.major}.{sys.version_info.minor} standard library sources"
        if self.kind == "hub":
            return f"Hub dataset {self.name}, split {self.split}"
        return f"{len(self.paths)} text file{'s' if len(self.paths) != 1 else ''}"


@dataclass(frozen=True)
class Corpus:
    """An entry of the cache."""

    folder: Path
    source: str
    dtype: str
    vocab_size: int
    mask_id: int | None
    special_ids: list[int]


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
    return chosen_files


def open_corpus(request: CorpusRequest, cache_dir: Path, on_make: Callable[[str], None]) -> Corpus:
    """Return the cache's entry for `request`; a missing one is made, after a call of `on_make` with the detail."""
    folder = cache_dir / "tokens" / _key(request)

    def make(half_made: Path) -> None:
        tokenizer = f"the tokenizer of {request.tokenizer}" if request.tokenizer else "a byte-level BPE trained on it"
        on_make(f"tokenizing {request.source} with {tokenizer}, once")
        build_in_child(request, half_made)

    make_once(folder, "meta.json", make, on_make)
    return Corpus(folder=folder, **json.loads((folder / "meta.json").read_text()))


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
    return [str(path), status.st_size, status.st_mtime_ns]


PAD_TOKEN, END_TOKEN, MASK_TOKEN = "<pad>", "<end>", "<mask>"
"""Special tokens of a tokenizer that is trained here."""
DOCUMENTS_AT_ONCE, LINES_AT_ONCE = 64, 4096
"""Texts that are tokenized in one call."""
Encode = Callable[[list[str]], list[list[int]]]
"""Returns the token ids of each text."""


def build_in_child(request: CorpusRequest, folder: Path) -> None:
    """Run `build` in a fresh process; an error raised there is raised here.

    Not in a pool: it needs threads of its own, and waits for ever where a limit on processes allows none.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_build_and_send, args=(request, folder, sender))
    child.start()
    sender.close()
    with receiver:
        try:
            error = receiver.recv()
        except EOFError:
            child.join()
            error = RuntimeError(f"tokenizing ended with exit code {child.exitcode}; more in output.log")
    child.join()
    if error is not None:
        raise error


def _build_and_send(request: CorpusRequest, folder: Path, sender: Connection) -> None:
    error: Exception | None = None
    try:
        build(request, folder)
    except BaseException as raised:  # a panic of the tokenizers' Rust is no Exception
        error = raised if isinstance(raised, Exception) else RuntimeError(one_line(raised))
    sender.send(error)


def build(request: CorpusRequest, folder: Path) -> None:
    """Write the files of the entry for `request` into `folder`."""
    # The launcher forbids these threads where DataLoader workers are forked; nothing is forked from here.
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    labelled_texts = list(texts(request))
    if not labelled_texts:
        raise InvalidInput(f"{request.source}: no text in it", key="data.paths")
    contents, labels = [text for text, _ in labelled_texts], [label for _, label in labelled_texts]
    if request.tokenizer is None:
        encode, meta = _train_bpe(contents, request.vocab, folder)
    else:
        encode, meta = _pretrained(request.tokenizer, request.vocab)
    dtype = "<u2" if meta["vocab_size"] <= 1 << 16 else "<u4"
    end_id = meta.pop("end_id")
    end = [] if end_id is None else [end_id]
    lengths: list[int] = []
    at_once = LINES_AT_ONCE if request.lines else DOCUMENTS_AT_ONCE
    with open(folder / "ids.bin", "wb") as out:
        for start in range(0, len(contents), at_once):
            for ids in encode(contents[start : start + at_once]):
                document = np.asarray(ids + end, dtype=dtype)
                lengths.append(document.size)
                out.write(document.tobytes())
    for name, values in (("lengths", lengths), ("labels", labels)):
        np.asarray(values, dtype="<i8").tofile(folder / f"{name}.bin")
    meta.update(source=request.source, dtype=dtype)
    (folder / "meta.json").write_text(json.dumps(meta))


def _train_bpe(contents: list[str], vocab: int, folder: Path) -> tuple[Encode, dict[str, Any]]:
    """Train a byte-level BPE of at most `vocab` ids, which the launch has checked, on these texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab, VOCAB_LIMIT),
        special_tokens=[PAD_TOKEN, END_TOKEN, MASK_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(contents, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    meta = {
        "vocab_size": tokenizer.get_vocab_size(),
        "end_id": tokenizer.token_to_id(END_TOKEN),
        "mask_id": tokenizer.token_to_id(MASK_TOKEN),
        "special_ids": [tokenizer.token_to_id(name) for name in (PAD_TOKEN, END_TOKEN, MASK_TOKEN)],
    }
    return lambda batch: [encoding.ids for encoding in tokenizer.encode_batch(batch)], meta


def _pretrained(name: str, vocab: int) -> tuple[Encode, dict[str, Any]]:
    """Load the tokenizer of a directory or a Hub id. Raises InvalidInput if it has more than `vocab` ids."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:
        message = f"the tokenizer of {name} could not be loaded: {one_line(error)}"
        raise InvalidInput(message, key="data.tokenizer") from error
    if len(tokenizer) > vocab:
        raise InvalidInput(
            f"the tokenizer of {name} has {len(tokenizer)} ids, the model's vocab_size is {vocab}",
            key="model.vocab_size",
            allowed=[f"{len(tokenizer)} or more"],
            nearest=str(len(tokenizer)),
        )
    end_id = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    meta = {
        "vocab_size": len(tokenizer),
        "end_id": end_id,
        "mask_id": tokenizer.mask_token_id,
        "special_ids": sorted(set(tokenizer.all_special_ids)),
    }
    return lambda batch: list(tokenizer(batch, add_special_tokens=False)["input_ids"]), meta
