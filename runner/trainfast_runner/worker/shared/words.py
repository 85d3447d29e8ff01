"""The phases of a step, as they are timed and as their memory is measured."""

STEP_PHASES = ("data", "forward", "backward", "optimizer", "other")
"""Phases of a step, in their order; `other` is the remainder."""
MEMORY_PHASES = ("forward_backward", "optimizer")
"""The phases of a step whose peaks are measured apart, as in a step record's `phase_peaks`."""


DATA_KINDS = ("text", "files", "hub", "random", "jpeg")
"""Values of `data.kind`."""
TRAINING_OBJECTIVES = ("causal-lm", "masked-lm", "sequence-classification", "seq2seq", "image-classification")
"""Values of `data.objective`."""
DATA_TEXTS = ("documents", "lines")
"""Values of `data.texts`."""
SMALLEST_VOCAB = 300
"""256 bytes and the special tokens leave little room for merges below this."""


CONTROL_FILE = "control.jsonl"
"""The parent's orders to a warm process, in the run directory."""
PROBE, CONFIRMATION = "probe", "proof"
"""Roles of a batch search's runs: the process in which it tries batch sizes, and the run that confirms one."""
TRIAL = "trial"
"""Role of a best-fit search's warm process, which tries many candidates, or of a script's run, which tries one."""


def split_tokens(seq_len: int) -> tuple[int, int]:
    """Tokens of a sample that the encoder reads (the first half) and that the decoder writes (the rest)."""
    return seq_len // 2, seq_len - seq_len // 2


def positions_needed(objective: str, seq_len: int) -> int:
    """Positions that a text model needs for `seq_len` tokens; each half of a seq2seq sample has its own."""
    return max(split_tokens(seq_len)) if objective == "seq2seq" else seq_len


def longest_seq_len(objective: str, positions: int) -> int:
    """The largest `seq_len` that a text model with so many positions takes."""
    return positions * 2 if objective == "seq2seq" else positions


TRACED_CATEGORIES = ("params", "grads", "optimizer", "activations", "temporary", "frozen", "quantized")
"""Categories of the live bytes of a trace, which is of one process that shares nothing.

`params` are trained; `frozen` ones are not, and `quantized` are frozen ones in fewer bits with their scales.
"""
PARAMS, GRADS, OPTIMIZER, ACTIVATIONS, TEMPORARY, FROZEN, QUANTIZED = range(len(TRACED_CATEGORIES))
"""Places of the categories in a trace's lists of bytes."""
WEIGHTS = (PARAMS, FROZEN, QUANTIZED)
NO_WORK = (0.0, 0.0, 0.0)
"""Calls of operations, FLOPs, bytes moved."""
TRACED_MICRO_BATCHES = 2
"""Micro-batches of a trace: in the second, gradients are alive from its start, as in all but the first."""
NODE_VARIABLE = "TRAINFAST_NODE"
"""The variable with the number of a rank's node, in a run on several."""
