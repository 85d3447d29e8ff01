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
