"""Cut text into token ids and write an entry of the cache.

Runs in a process of its own, so that its hundreds of MB are not in the training's memory baseline.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from ..invalid import InvalidInput, one_line
from ..shared.words import SMALLEST_VOCAB
from .corpus import VOCAB_LIMIT, CorpusRequest, describe, texts

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
    """Write `ids.bin`, `lengths.bin` and `meta.json` (and `tokenizer.json`) of `request` into `folder`."""
    # The launcher forbids these threads where DataLoader workers are forked; nothing is forked from here.
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    labelled_texts = list(texts(request))
    if not labelled_texts:
        raise InvalidInput(f"{describe(request)}: no text in it", key="data.paths")
    contents, labels = [text for text, _ in labelled_texts], [label for _, label in labelled_texts]
    if request.tokenizer is None:
        encode, meta = _train_bpe(contents, request.vocab, folder)
    else:
        encode, meta = _pretrained(request.tokenizer, request.vocab)
    dtype = "<u2" if meta["vocab_size"] <= 1 << 16 else "<u4"
    end_id = meta.pop("end_id")
    end = [] if end_id is None else [end_id]
    sections: list[tuple[int, int]] = []
    lengths: list[int] = []
    tokens = 0
    at_once = LINES_AT_ONCE if request.lines else DOCUMENTS_AT_ONCE
    with open(folder / "ids.bin", "wb") as out:
        for start in range(0, len(contents), at_once):
            encoded = encode(contents[start : start + at_once])
            for ids, label in zip(encoded, labels[start : start + at_once], strict=True):
                if not sections or sections[-1][1] != label:
                    sections.append((tokens, label))
                document = np.asarray(ids + end, dtype=dtype)
                lengths.append(document.size)
                tokens += document.size
                out.write(document.tobytes())
    np.asarray(lengths, dtype="<u4").tofile(folder / "lengths.bin")
    meta.update(source=describe(request), dtype=dtype, tokens=tokens, sections=sections)
    (folder / "meta.json").write_text(json.dumps(meta))


def _train_bpe(contents: list[str], vocab: int, folder: Path) -> tuple[Encode, dict[str, Any]]:
    """Train a byte-level BPE of at most `vocab` ids on these texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab < SMALLEST_VOCAB:
        raise InvalidInput(
            f"the model's vocab_size is {vocab}; a byte-level BPE needs at least {SMALLEST_VOCAB}",
            key="model.vocab_size",
            allowed=[f"{SMALLEST_VOCAB} or more"],
            nearest=str(SMALLEST_VOCAB),
        )
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
