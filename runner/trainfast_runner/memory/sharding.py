"""Memory rules of the strategies: from one process's live bytes to those that each rank keeps and exchanges.

The rules are read from torch 2.13's DistributedDataParallel and fully_shard and from DeepSpeed 0.19's stages as this
product configures them (`zero_config.py`), and held against real ranks by `benchmarks/memory.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainfast_runner.errors import UserError
from trainfast_runner.memory.model_size import FULL_BYTES, HALF_BYTES
from trainfast_runner.memory.one_process import with_copied_gradients
from trainfast_runner.memory.timeline import BlockStack, Moment, Place, Vector
from trainfast_runner.settings.precisions import MIXED
from trainfast_runner.settings.strategies import strategy_of
from trainfast_runner.worker.catalog import STRATEGIES
from trainfast_runner.worker.shared_tables import ACTIVATIONS, GRADS, OPTIMIZER, PARAMS, TEMPORARY

PIPELINES = tuple(name for name, entry in STRATEGIES.items() if entry.is_pipeline)
"""Strategies whose ranks hold stages, see `pipeline.py`. Pipelines side by side sum gradients in place."""
STAGED = tuple(name for name, entry in STRATEGIES.items() if entry.memory_rule == "Staged")
"""Strategies that cut a model into stages, one rank's or one GPU's each."""
PREDICTED = tuple(name for name, entry in STRATEGIES.items() if entry.memory_rule is not None)
LOOP_SCRATCH = 2
"""Copies of a parameter that AdamW's loop holds at once: the root of the second moment, and that divided."""


@dataclass(frozen=True)
class WholeModel:
    """The model in one process, in bytes before the optimizer's step and in elements."""

    stacks: list[BlockStack]
    parameters: int
    standing: list[float]
    on_gpu: bool
    largest: int = 0
    """Elements of the largest parameter."""

    @property
    def width(self) -> float:
        """Bytes of one weight."""
        return self.standing[PARAMS] / max(1, self.parameters)

    @property
    def blocks(self) -> list[int]:
        """Elements of every block, stack after stack."""
        return [size for stack in self.stacks for size in stack.sizes]

    @property
    def root(self) -> int:
        """Elements outside of all blocks: embeddings and head."""
        return max(0, self.parameters - sum(self.blocks))


class Sharing:
    """A rank that keeps everything."""

    def __init__(self, whole: WholeModel, ranks: int, knobs: Mapping[str, Any]) -> None:
        self.whole = whole
        self.ranks = max(1, ranks)
        self.knobs = knobs
        self.mixed = knobs["precision"] in MIXED
        self.on_gpu = whole.on_gpu
        self.accumulates = int(knobs["grad_accum"]) > 1

    def at(self, moment: Moment) -> Vector:
        """Live bytes by CATEGORIES at a moment of forward or backward."""
        return (*moment.live, 0.0)

    def in_optimizer(self, live: Vector) -> Vector:
        """Live bytes by CATEGORIES at the optimizer's peak."""
        return (*live, 0.0)

    def _behind(self, place: Place) -> int:
        """Elements of the blocks that the backward is done with when it is at `place`."""
        done = sum(self.whole.stacks[place.stack].sizes[place.block + 1 :])
        return done + sum(sum(later.sizes) for later in self.whole.stacks[place.stack + 1 :])


class Replicated(Sharing):
    """DDP: the buckets in which gradients are averaged are a second copy of them, kept from the first step on."""

    def at(self, moment: Moment) -> Vector:
        """Live bytes and the buckets, which exist from the first step on."""
        return (*moment.live, self.whole.standing[GRADS])

    def in_optimizer(self, live: Vector) -> Vector:
        """Live bytes and the buckets, which exist from the first step on."""
        return (*live, self.whole.standing[GRADS])


class Copied(Sharing):
    """`dp`: the first GPU, which is the fullest; see `one_process.py`."""

    def at(self, moment: Moment) -> Vector:
        """Gradients of the copies are added to those there are only when all have come."""
        width = self.whole.standing[GRADS] / max(1, self.whole.parameters)
        come = 0.0 if moment.place is None else width * self._behind(moment.place)
        return (*with_copied_gradients(moment, come, self.whole.standing[GRADS]), 0.0)


class FullySharded(Sharing):
    """FSDP2: each rank keeps a shard of everything; a block is whole while it computes, the rest from first to last.

    In the backward the next block is gathered ahead, and the last one's gradients lie in the buffer they are reduced
    from. What is outside of the blocks is reduced last: its gradients stay whole until then.
    """

    def at(self, moment: Moment) -> Vector:
        """Shards, the gathered part of the model, and gradients that are not reduced yet."""
        live, n = list(moment.live), self.ranks
        gathered = HALF_BYTES if self.mixed else self.whole.width
        block = 0 if moment.place is None else self.whole.stacks[moment.place.stack].sizes[moment.place.block]
        sent = gathered * (self.whole.root + block)
        if self.mixed:
            # The gathered weights are the cast ones that autocast would have made.
            live[ACTIVATIONS] -= min(live[ACTIVATIONS], max(0.0, moment.unscaled))
        if self.knobs.get("reshard") == "off":
            sent = gathered * self.whole.parameters
        elif moment.backward and moment.place is not None:
            sent += gathered * block
        if moment.backward and moment.place is not None:
            sent += FULL_BYTES * block
        whole_grads = live[GRADS] if self.accumulates else max(0.0, live[GRADS] - self._reduced(moment))
        live[PARAMS] /= n
        live[OPTIMIZER] /= n
        live[GRADS] = whole_grads + (live[GRADS] - whole_grads) / n
        return (*live, sent)

    def in_optimizer(self, live: Vector) -> Vector:
        """Slices of everything."""
        n = self.ranks
        return (live[PARAMS] / n, live[GRADS] / n, live[OPTIMIZER] / n, live[ACTIVATIONS], live[TEMPORARY] / n, 0.0)

    def _reduced(self, moment: Moment) -> float:
        """Bytes of the gradients of the blocks that the backward is done with."""
        if not moment.backward:
            return moment.live[GRADS]
        width = self.whole.standing[GRADS] / max(1, self.whole.parameters)
        if moment.place is None:
            every = width * sum(self.whole.blocks)
            return every if moment.live[GRADS] >= every else 0.0
        return width * self._behind(moment.place)


class ZeroPartitioned(Sharing):
    """ZeRO-1 and -2: whole weights, a part of the master copy and of the states, one bucket of gradients.

    The bucket has room for the whole model's gradients (`reduce_bucket_size`). The stages take the same memory here:
    what stage 1 keeps of the other ranks' gradients lies in the bucket.
    """

    def __init__(self, whole: WholeModel, ranks: int, knobs: Mapping[str, Any]) -> None:
        super().__init__(whole, ranks, knobs)
        # Weights are half for the half precisions, whatever the trace had.
        self.width = FULL_BYTES if knobs["precision"] in ("fp32", "tf32") else HALF_BYTES
        self.weights = float(self.width * whole.parameters)
        masters = FULL_BYTES if knobs["precision"] != "bf16-pure" else HALF_BYTES
        self.masters = masters * whole.parameters / self.ranks
        self.states = whole.standing[OPTIMIZER] * masters / whole.width / self.ranks

    def at(self, moment: Moment) -> Vector:
        """Gradients go into the bucket as they come and are reduced from it; the rank's own part is kept."""
        live, come = moment.live, self._come(moment)
        # A GPU allocates it whole; of the host's memory only what is written is taken.
        bucket = (self.weights if self.on_gpu else come) if moment.backward else 0.0
        grads = (self.weights if moment.micro > 1 else come) / self.ranks
        return (self.weights, grads, self.masters + self.states, live[ACTIVATIONS], live[TEMPORARY], bucket)

    def in_optimizer(self, live: Vector) -> Vector:
        """The rank's gradients are flattened in the masters' type beside what was reduced, and updated as one."""
        grads = self.weights / self.ranks + self.masters
        return (
            self.weights,
            grads,
            self.masters + self.states,
            live[ACTIVATIONS],
            self._scratch(live, self.masters),
            0,
        )

    def _come(self, moment: Moment) -> float:
        """Bytes of the gradients that the running micro-batch has made."""
        if moment.micro > 1:
            # Those of earlier ones are alive throughout; outside of the blocks only its beginning can be the peak.
            return float(self.width * self._behind(moment.place)) if moment.place is not None else 0.0
        return min(self.weights, moment.live[GRADS] * self.weights / max(1.0, self.whole.standing[GRADS]))

    def _scratch(self, live: Vector, flat: float) -> float:
        """Temporary bytes of the update of a flat tensor of `flat` bytes."""
        if live[TEMPORARY] > self.whole.standing[PARAMS] / 2:
            return live[TEMPORARY] * flat / self.whole.standing[PARAMS]  # all parameters at a time, foreach
        return LOOP_SCRATCH * flat if live[TEMPORARY] else 0.0

    def _host_scratch(self, live: Vector, flat: float) -> float:
        """Temporary bytes of an update on the host: none with DeepSpeed's own AdamW, else what torch's loop takes."""
        return 0.0 if self.knobs["optimizer"] == "adamw" or not live[TEMPORARY] else LOOP_SCRATCH * flat


class ZeroParameters(ZeroPartitioned):
    """ZeRO-3: the weights are parts as well; up to two parts of the model are gathered, and one bucket is reduced."""

    @property
    def part(self) -> float:
        """Bytes of the largest part: a block, or everything outside of the blocks."""
        return float(self.width * max([self.whole.root, *self.whole.blocks]))

    def at(self, moment: Moment) -> Vector:
        """Parts, the gathered weights and the gradients being reduced."""
        live, n = moment.live, self.ranks
        sent = 2 * self.part + (2 * self.part if moment.backward else 0.0)
        grads = self.weights / n
        return (self.weights / n, grads, self.masters + self.states, live[ACTIVATIONS], live[TEMPORARY], sent)

    def in_optimizer(self, live: Vector) -> Vector:
        """Group after group of at most a part's elements is updated, and gathered."""
        grads = self.weights / self.ranks + self.masters
        group = min(self.masters, FULL_BYTES * self.part / self.width)
        scratch = self._scratch(live, group)
        return (
            self.weights / self.ranks,
            grads,
            self.masters + self.states,
            live[ACTIVATIONS],
            scratch,
            self.part,
        )


class ZeroOffloaded(ZeroPartitioned):
    """ZeRO-2 with offload: whole weights and the bucket on the device, of the rest two staging buffers.

    Masters, states and the gradients they are updated from leave the device; on a CPU both are the same memory.
    """

    def at(self, moment: Moment) -> Vector:
        """The host has the rank's gradients all the time, and what has come of them in earlier micro-batches."""
        live, come = moment.live, self._come(moment)
        bucket = (self.weights if self.on_gpu else come) if moment.backward else 0.0
        if self.on_gpu:
            return (self.weights, 0.0, 0.0, live[ACTIVATIONS], live[TEMPORARY], bucket + self.staging)
        return (*self._on_host(), live[ACTIVATIONS], live[TEMPORARY], bucket + 2 * self.staging)

    def in_optimizer(self, live: Vector) -> Vector:
        """Updated on the host, copied to the device, gathered; gloo gathers into memory of its own."""
        if self.on_gpu:
            return (self.weights, 0.0, 0.0, live[ACTIVATIONS], 0.0, self.staging)
        scratch = self._host_scratch(live, self.masters)
        sent = 2 * self.staging + max(0.0, self.weights - scratch)
        return (*self._on_host(), live[ACTIVATIONS], scratch, sent)

    @property
    def staging(self) -> float:
        """Bytes through which a gradient passes on the device: room for the largest parameter."""
        return float(self.width * self.whole.largest)

    def _on_host(self) -> tuple[float, float, float]:
        """Weights and the part of them that is on its way back to the device, gradients, masters and states."""
        # Gradients of earlier micro-batches are added up in a copy of their own; with half masters in place.
        apart = self.accumulates and str(self.knobs["precision"]) != "bf16-pure"
        grads = self.masters + (self.weights / self.ranks if apart else 0.0)
        return (self.weights + self.weights / self.ranks, grads, self.masters + self.states)


class ZeroParametersOffloaded(ZeroParameters):
    """ZeRO-3 with offload: the device holds the gathered weights and the gradients being reduced."""

    def at(self, moment: Moment) -> Vector:
        """The host keeps the gradients in both types."""
        params, grads, optimizer, activations, temporary, sent = super().at(moment)
        if self.on_gpu:
            return (0.0, 0.0, 0.0, activations, temporary, sent)
        return (params, grads + self.masters, optimizer, activations, temporary, sent)

    def in_optimizer(self, live: Vector) -> Vector:
        """No states and no update on the device; on a CPU both are in the host's memory, as in ZeRO-3."""
        if self.on_gpu:
            return (0.0, 0.0, 0.0, live[ACTIVATIONS], 0.0, 0.0)
        params, grads, optimizer, activations, _, sent = super().in_optimizer(live)
        scratch = self._host_scratch(live, min(self.masters, FULL_BYTES * self.part / self.width))
        return (params, grads, optimizer, activations, scratch, sent)


RULES = {
    rule.__name__: rule
    for rule in (
        Sharing,
        Replicated,
        Copied,
        FullySharded,
        ZeroPartitioned,
        ZeroParameters,
        ZeroOffloaded,
        ZeroParametersOffloaded,
    )
}
"""The catalog's `memory_rule`s. Under tensor parallelism the trace is of one rank's part of the model, and the dp axis
shares this part like a whole model."""


def sharing_of(knobs: Mapping[str, Any], ranks: int, whole: WholeModel) -> Sharing:
    """The sharing of the knobs' strategy. Raises UserError for one whose memory is not predicted."""
    strategy = strategy_of(knobs)
    if strategy.memory_rule not in RULES:
        raise UserError(
            f"the memory of strategy={strategy.name} is not predicted", key="strategy", allowed=list(PREDICTED)
        )
    if strategy.is_tensor_parallel:
        ranks //= int(knobs["tp_degree"])
    return RULES[strategy.memory_rule](whole, ranks, knobs)
