"""Compare a prediction with the available memory, and find the largest batch that fits: for `predict` and the bar."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from trainfast_runner.bisection import largest_fitting
from trainfast_runner.errors import UserError
from trainfast_runner.machine.devices import Machine
from trainfast_runner.memory.available import AvailableMemory, available_memory
from trainfast_runner.memory.corrections import WHOLE_STEP, correction_key
from trainfast_runner.memory.model import MemoryModel, batch_multiple
from trainfast_runner.memory.prediction import Prediction
from trainfast_runner.settings.compatibility.check import refusal_here
from trainfast_runner.settings.device_counts import first_gpu_name
from trainfast_runner.settings.spec import RunSpec

UNTOUCHED_BYTES = 12 << 20
"""Address space reserved and never touched, which a limit of a CPU counts too (measured: 8.0 to 10.8 MiB)."""
UNCORRECTED_MARGIN_BYTES = 32 << 20
"""`UNTOUCHED_BYTES`, buffers of libraries and small blocks beyond an uncorrected prediction (measured: 7 to 21 MiB)."""
UNCORRECTED_MARGIN_SHARE = 0.03
"""Least share of the peak in an uncorrected margin: the error of uncorrected predictions of larger models."""
EXTRAPOLATED_SHARE = 0.015
"""Share of the growth beyond the measured size: the error of a slope, as in a batch search."""
COMPILER_BYTES = 128 << 20
"""Memory of a compiled program before any such run was measured (tiny-llama: 52 to 98 MiB, and 33 MiB not touched)."""
COLD_COMPILER_BYTES = 48 << 20
"""Part of `COMPILER_BYTES` that a new compilation takes beyond a cached program (measured: 40 MiB)."""
TRAINER_BYTES = 20 << 20
"""Memory of transformers' Trainer (tiny-llama: 15 to 19 MiB)."""


@dataclass(frozen=True, slots=True)
class PredictedFit:
    """A prediction beside the available memory."""

    predicted: Prediction
    available: AvailableMemory | None = None
    """The available memory; None if it is unknown, and with it the two figures below."""
    margin_bytes: int = 0
    """Bytes that must stay free beside the predicted peak for the run to survive."""
    max_batch: int | None = None
    """The largest batch that fits; 0 if not even one sample does."""
    refusal: UserError | None = None
    """The refusal of a run that this machine lacks the devices for."""

    @property
    def needed_bytes(self) -> int:
        """Memory the run needs: the peak, its margin, and the CUDA context if that comes out of the same memory."""
        with_context = self.available is not None and self.available.with_context
        context_bytes = self.predicted.context_bytes if with_context else None
        return self.predicted.total_bytes + self.margin_bytes + (context_bytes or 0)

    @property
    def left_bytes(self) -> int | None:
        """Bytes left over; negative if the run does not fit, None if the available memory is unknown."""
        return None if self.available is None else self.available.size_bytes - self.needed_bytes

    @property
    def fits(self) -> bool | None:
        """True if the run fits; None if the available memory is unknown."""
        return None if self.left_bytes is None else self.left_bytes >= 0


def predict_headroom(
    model: MemoryModel, spec: RunSpec, machine: Machine, ranks: int, host_free_bytes: int | None
) -> PredictedFit:
    """Predict a run on this machine, whose host has `host_free_bytes` free (None if unknown).

    Raises UserError for GPUs that do not exist, and for a strategy whose memory is not predicted.
    """
    refusal = refusal_here(spec, machine)
    if refusal is None:
        model = model.corrected_for(first_gpu_name(spec, machine))
    predicted = model.predict(spec, ranks)
    # A run that cannot run here is planned for another machine: free memory here does not matter.
    available = available_memory(
        spec, machine, ranks, host_free_bytes, predicted.context_bytes, is_here=refusal is None
    )
    if available is None:
        return PredictedFit(predicted, refusal=refusal)
    # RLIMIT_DATA also counts memory outside the trace; a GPU's cap does not.
    needs_margin = model.device == "cpu" and available.from_memory_limit
    needed_margin_bytes = margin_bytes(model, spec, ranks, predicted) if needs_margin else 0
    max_batch = model.max_batch(spec, ranks, available.for_allocator(predicted.context_bytes))
    if needs_margin:

        def fits(batch: int) -> bool:
            sized = replace(spec, knobs={**spec.knobs, "batch_size": batch})
            sized_prediction = model.predict(sized, ranks)
            sized_margin_bytes = margin_bytes(model, sized, ranks, sized_prediction)
            return PredictedFit(sized_prediction, available, sized_margin_bytes).fits is True

        max_batch = largest_fitting(fits, max_batch, batch_multiple(spec.knobs))
    return PredictedFit(predicted, available, needed_margin_bytes, max_batch, refusal)


def margin_bytes(model: MemoryModel, spec: RunSpec, ranks: int, predicted: Prediction) -> int:
    """Bytes a limit of a CPU must have beside the predicted peak: as earlier runs took them, else by the constants.

    After a run out of memory under a limit, the margin is large enough that the same size no longer fits that limit.
    """
    correction = model.correction_for(spec, ranks)
    failed_correction = model.corrections.failed_by_case.get(correction_key(predicted.trace, spec.knobs, ranks))
    compiles = spec.knobs["compile"] != "off"
    if correction is None:
        program_bytes = COMPILER_BYTES if compiles else 0
        program_bytes += TRAINER_BYTES if spec.knobs["engine"] == "trainer" else 0
        least_bytes = program_bytes + max(
            UNCORRECTED_MARGIN_BYTES, int(UNCORRECTED_MARGIN_SHARE * predicted.total_bytes)
        )
    else:
        grown_bytes = max(0, predicted.traced_bytes["forward_backward"] - (correction.step_bytes or 0))
        least_bytes = UNTOUCHED_BYTES + int(EXTRAPOLATED_SHARE * grown_bytes) + (COLD_COMPILER_BYTES if compiles else 0)
    if failed_correction is None:
        return least_bytes
    traced_bytes = max(predicted.traced_bytes.values(), default=predicted.total_bytes)
    beyond_bytes = failed_correction.share(spec.knobs, traced_bytes) * failed_correction.beyond_bytes[WHOLE_STEP]
    return max(least_bytes, ceil(traced_bytes + beyond_bytes) - predicted.total_bytes)
