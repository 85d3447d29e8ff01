"""Whether a predicted run fits into what a rank may use, and the largest batch that does: for `predict` and the bar."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

from trainfast_runner.memory.available import Room, gpu_of, room_of
from trainfast_runner.memory.corrections import case
from trainfast_runner.memory.model import keeps_more
from trainfast_runner.memory.prediction import Prediction
from trainfast_runner.memory.sharding import PIPELINES
from trainfast_runner.settings.compatibility.check import cannot_run_here

if TYPE_CHECKING:
    from trainfast_runner.errors import UserError
    from trainfast_runner.machine.devices import Machine
    from trainfast_runner.memory.model import MemoryModel
    from trainfast_runner.settings.spec import RunSpec

COUNTED_BYTES = 12 << 20
"""What a limit of a CPU counts beyond a run's peak: address space that is reserved and not touched. Searches measured
8.0 to 9.3 MiB with tiny-llama at batch sizes from 3 to 30, 9.4 and 10.8 MiB with Bert at 8 and 14."""
UNMEASURED_BYTES = 32 << 20
"""The same with what a run takes beyond a prediction that no run has corrected: buffers of libraries, blocks below the
C library's threshold. A small model (4 layers, 50 MiB) under 100 MiB ran out when turned so that 71 MiB were predicted,
and finished with 68; tiny-llama, Bert and ViT took 7 to 21 MiB beyond the trace."""
UNMEASURED_SHARE = 0.03
"""Of the peak, where that is more: what predictions of larger models were off by before any run corrected them."""
EXTRAPOLATED_SHARE = 0.015
"""Of what a size takes beyond the one that was measured: as far as a search takes its own slope to be off."""
COMPILER_BYTES = 128 << 20
"""What a process that compiles takes besides, before any such run: tiny-llama took 52 MiB more than without (from the
compiler's cache) to 98 MiB (anew), the more at the smaller batch, and 33 MiB of address space were not touched."""
COLD_COMPILER_BYTES = 48 << 20
"""Of that, what one that finds nothing in its cache takes more than the run before it that did: what was learnt of
batch 8 was 40 MiB too little for batch 4, which was compiled anew."""
TRAINER_BYTES = 20 << 20
"""The same of transformers' Trainer: 15 to 19 MiB with tiny-llama."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A prediction beside what there is.

    `margin_bytes` is what has to stay free beside the predicted peak for the run to survive in `room`. `max_batch` is
    the largest batch that fits, 0 where not even one sample does. Both are unknown without a room. `cannot_run` is
    the refusal of a run that this machine has not the devices for, whatever the memory.
    """

    predicted: Prediction
    room: Room | None = None
    margin_bytes: int = 0
    max_batch: int | None = None
    cannot_run: UserError | None = None

    @property
    def needed_bytes(self) -> int:
        """What has to fit in the room: the peak, its margin, and the context where that comes out of it."""
        context = self.predicted.context_bytes if self.room is not None and self.room.with_context else None
        return self.predicted.total_bytes + self.margin_bytes + (context or 0)

    @property
    def left_bytes(self) -> int | None:
        """What is left of the room; negative where it does not fit."""
        return None if self.room is None else self.room.limit_bytes - self.needed_bytes

    @property
    def fits(self) -> bool | None:
        """None where nobody limits anything, or it is not known."""
        return None if self.left_bytes is None else self.left_bytes >= 0


def fit_of(model: MemoryModel, spec: RunSpec, machine: Machine, ranks: int, host_free_bytes: int | None) -> Fit:
    """What the model says of a run on this machine, of whose host so much is free (None: unknown).

    Raises UserError for GPUs that are not there, and for what is not predicted.
    """
    cannot_run = cannot_run_here(spec, machine)
    if cannot_run is None:
        model = model.on(gpu_of(spec, machine))
    predicted = model.predict(spec, ranks)
    # What is free here says nothing to somebody who plans for another machine.
    room = room_of(spec, machine, ranks, host_free_bytes, predicted.context_bytes, is_here=cannot_run is None)
    if room is None:
        return Fit(predicted, cannot_run=cannot_run)
    counts = model.device == "cpu" and room.is_memory_limit
    margin = margin_bytes(model, spec, ranks, predicted) if counts else 0
    most = model.max_batch(spec, ranks, room.for_allocator(predicted.context_bytes)) or 0
    return Fit(predicted, room, margin, _with_margin(model, spec, ranks, room, most) if counts else most, cannot_run)


def _with_margin(model: MemoryModel, spec: RunSpec, ranks: int, room: Room, most: int) -> int:
    """Of the batch sizes whose peaks fit the largest whose margin does too; 0 where there is none."""

    def fits(batch: int) -> bool:
        sized = replace(spec, knobs={**spec.knobs, "batch_size": batch})
        predicted = model.predict(sized, ranks)
        return Fit(predicted, room, margin_bytes(model, sized, ranks, predicted)).fits is True

    if most == 0 or fits(most):
        return most
    # A pipeline cuts the batch into equal parts.
    parts = int(str(spec.knobs["micro_batches"])) if spec.knobs["strategy"] in PIPELINES else 1
    low, high = 0, most // parts
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * parts) else (low, middle)
    return low * parts


def margin_bytes(model: MemoryModel, spec: RunSpec, ranks: int, predicted: Prediction) -> int:
    """What a limit of a CPU has to have beside the predicted peak: as such runs here said, else as a rule.

    A size that ran out of memory under a limit does not fit into it.
    """
    known, machine = model.known(spec, ranks), model.machine
    where = case(predicted.trace, spec.knobs, ranks)
    compiles = spec.knobs["compile"] != "off"
    if known is None:
        program = COMPILER_BYTES if compiles else 0
        program += TRAINER_BYTES if spec.knobs["engine"] == "trainer" else 0
        margin = program + max(UNMEASURED_BYTES, int(UNMEASURED_SHARE * predicted.total_bytes))
    else:
        grown = max(0, predicted.traced_bytes["forward_backward"] - (known.step_bytes or 0))
        margin = machine.counted_bytes.get(where, COUNTED_BYTES) + int(EXTRAPOLATED_SHARE * grown)
        margin += COLD_COMPILER_BYTES if compiles else 0
    traced = max(predicted.traced_bytes.values(), default=predicted.total_bytes)
    needed = [traced + one.beyond_bytes(traced, keeps_more(spec)) for one in machine.ran_out.get(where, [])]
    return max(margin, *(ceil(total) - predicted.total_bytes for total in needed)) if needed else margin
