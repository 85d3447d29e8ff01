"""The tokens of a sample that a model reads and writes, and the positions that they need."""

from __future__ import annotations


def split_tokens(seq_len: int) -> tuple[int, int]:
    """Tokens of a sample that the encoder reads (the first half) and that the decoder writes (the rest)."""
    return seq_len // 2, seq_len - seq_len // 2


def positions_needed(objective: str, seq_len: int) -> int:
    """Positions that a text model needs for `seq_len` tokens; each half of a seq2seq sample has its own."""
    return max(split_tokens(seq_len)) if objective == "seq2seq" else seq_len


def longest_seq_len(objective: str, positions: int) -> int:
    """The largest `seq_len` that a text model with so many positions takes."""
    return positions * 2 if objective == "seq2seq" else positions
