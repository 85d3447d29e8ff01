"""The data and the objectives that a preset may name."""

from __future__ import annotations

DATA_KINDS = ("text", "files", "hub", "random", "jpeg")
"""Values of `data.kind`."""
TRAINING_OBJECTIVES = ("causal-lm", "masked-lm", "sequence-classification", "seq2seq", "image-classification")
"""Values of `data.objective`."""
DATA_SAMPLES = ("packed", "documents", "lines")
"""Values of `data.samples`."""
SMALLEST_VOCAB = 300
"""256 bytes and the special tokens leave little room for merges below this."""


def split_tokens(seq_len: int) -> tuple[int, int]:
    """Tokens of a sample that the encoder reads (the first half) and that the decoder writes (the rest)."""
    return seq_len // 2, seq_len - seq_len // 2


def positions_needed(objective: str, seq_len: int) -> int:
    """Positions that a text model needs for `seq_len` tokens; each half of a seq2seq sample has its own."""
    return max(split_tokens(seq_len)) if objective == "seq2seq" else seq_len


def longest_seq_len(objective: str, positions: int) -> int:
    """The largest `seq_len` that a text model with so many positions takes."""
    return positions * 2 if objective == "seq2seq" else positions
