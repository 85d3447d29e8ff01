"""The coefficients of one model's memory, and the arithmetic from them to a prediction."""

from __future__ import annotations

import msgspec

from trainfast_runner.memory_model.prediction import Prediction
from trainfast_runner.spec import RunSpec


class MemoryModel(msgspec.Struct, frozen=True, kw_only=True):
    """Holds for one model, sequence length, precision, optimizer, attention, checkpointing and objective."""

    basis: str = ""

    def predict(self, spec: RunSpec, ranks: int = 1) -> Prediction:
        """The peak of the fullest of `ranks` processes with the knobs of `spec`; well under 50 ms."""
        raise NotImplementedError

    def max_batch(self, spec: RunSpec, ranks: int, limit_bytes: int) -> int | None:
        """The largest `batch_size` whose predicted peak is within `limit_bytes` a rank; None where 1 is not."""
        raise NotImplementedError
