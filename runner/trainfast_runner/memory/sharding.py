"""Memory rules of the strategies: from one process's live bytes to those that each rank keeps and exchanges.

The rules are read from torch 2.13's DistributedDataParallel and fully_shard and from DeepSpeed 0.19's stages as this
product configures them (`strategies/deepspeed_zero.py`), and held against real ranks by
`benchmarks/memory_prediction.py`. A trace cannot replace them: torch 2.13's fake process group refuses DDP, and gives
FSDP2 1,210 MiB where 1,057 ran. Those of one process with several GPUs are read from torch 2.13's `nn/parallel`
(replicate.py, parallel_apply.py, scatter_gather.py, _functions.py) and from the worker's `spread`; no run has been held
against them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.machine.devices_knob import gpu_indexes
from trainfast_runner.memory.model_size import FP32_BYTES
from trainfast_runner.memory.timeline import (
    NO_BYTES,
    BlockPosition,
    BlockStack,
    Moment,
    RankBytes,
    Segment,
    Vector,
    add,
)
from trainfast_runner.settings.precisions import PRECISIONS
from trainfast_runner.settings.spec import strategy_of
from trainfast_runner.worker.catalog import OPTIMIZERS, STRATEGIES
from trainfast_runner.worker.shared.words import ACTIVATIONS, GRADS, OPTIMIZER, PARAMS, TEMPORARY

PIPELINE_STRATEGIES = tuple(name for name, entry in STRATEGIES.items() if entry.is_pipeline)
"""Strategies whose ranks hold stages, see `pipeline.py`. Pipelines side by side sum gradients in place."""
STAGED_STRATEGIES = tuple(name for name, entry in STRATEGIES.items() if entry.memory_rule == "Staged")
"""Strategies that cut a model into stages, one rank's or one GPU's each."""
PREDICTED_STRATEGIES = tuple(name for name, entry in STRATEGIES.items() if entry.memory_rule is not None)

DATA_PARALLEL, LAYERS_SPREAD = "dp", "naive-mp"
UNCONFIRMED_STRATEGIES = (DATA_PARALLEL, LAYERS_SPREAD)
"""Strategies whose predictions say that no run confirmed them."""


def loop_scratch(knobs: Mapping[str, Any]) -> int:
    """Copies of a parameter that the optimizer's loop over parameters holds at once."""
    return OPTIMIZERS[str(knobs["optimizer"])].loop_scratch


@dataclass(frozen=True)
class WholeModel:
    """The model in one process: `before_optimizer` in bytes by TRACED_CATEGORIES, the rest in elements."""

    stacks: list[BlockStack]
    parameters: int
    before_optimizer: list[float]
    on_gpu: bool
    largest_parameter: int

    @property
    def weight_width(self) -> float:
        """Bytes of one weight."""
        return self.before_optimizer[PARAMS] / max(1, self.parameters)

    @property
    def gradient_width(self) -> float:
        """Bytes of one gradient."""
        return self.before_optimizer[GRADS] / max(1, self.parameters)

    @property
    def block_sizes(self) -> list[int]:
        """Elements of every block, stack after stack."""
        return [size for stack in self.stacks for size in stack.sizes]

    @property
    def outside_blocks(self) -> int:
        """Elements of the embeddings and the head."""
        return max(0, self.parameters - sum(self.block_sizes))

    def is_updated_in_loop(self, knobs: Mapping[str, Any], temporary_bytes: float) -> bool:
        """True if the temporaries of an optimizer's step are those of torch's loop over parameters, not of foreach.

        foreach holds temporaries of all parameters at once, the loop those of one: more than half of the parameters'
        bytes, too, where one embedding is a large part of the model.
        """
        loop_bytes = loop_scratch(knobs) * self.weight_width * self.largest_parameter
        return temporary_bytes <= max(self.before_optimizer[PARAMS] / 2, loop_bytes)

    def size_of(self, position: BlockPosition | None) -> int:
        """Elements of the block at this position; 0 outside of all blocks."""
        return 0 if position is None else self.stacks[position.stack].sizes[position.block]

    def size_after(self, position: BlockPosition) -> int:
        """Elements of the blocks after this position: their backward is over when the backward reaches it."""
        in_stack = sum(self.stacks[position.stack].sizes[position.block + 1 :])
        return in_stack + sum(sum(later.sizes) for later in self.stacks[position.stack + 1 :])


class MemoryRule:
    """Turns the live bytes of the whole model in one process into those of one rank of a strategy.

    The base class is the rule of a strategy whose rank keeps everything.
    """

    def __init__(self, model: WholeModel, ranks: int, knobs: Mapping[str, Any]) -> None:
        self.model = model
        self.ranks = max(1, ranks)
        self.knobs = knobs
        self.formats = PRECISIONS[str(knobs["precision"])]
        self.accumulates = int(knobs["grad_accum"]) > 1

    def at(self, moment: Moment) -> RankBytes:
        """The rank's bytes at a moment of forward or backward."""
        return RankBytes(*moment.live)

    def in_optimizer(self, live: Vector) -> RankBytes:
        """The rank's bytes at the peak of the optimizer's step, where the whole model has these `live` bytes."""
        return RankBytes(*live)


class Replicated(MemoryRule):
    """DDP: the buckets in which gradients are averaged are a second copy of them, kept from the first step on.

    The second step puts other buckets in their place. NCCL's process group keeps the first ones until its watchdog,
    which looks every 100 ms, has seen their reduction end (torch 2.11, ProcessGroupNCCL.cpp, TensorShelf): where steps
    are shorter than that, the next two have both. On an H200 a model of 225 MiB was predicted 5 % low so, and one of
    8.4 GiB within 0.1 %.
    """

    def at(self, moment: Moment) -> RankBytes:
        """Live bytes and the buckets."""
        return self.in_optimizer(moment.live)

    def in_optimizer(self, live: Vector) -> RankBytes:
        """Live bytes and the buckets."""
        return RankBytes(*live)._replace(communication=self.model.before_optimizer[GRADS])


class Copied(MemoryRule):
    """`dp`: the first GPU, which is the fullest; its step is that of `first_gpu_segments`.

    Its own weights are not copied (`broadcast_coalesced` returns the originals). One autograd node makes all copies, so
    its backward starts after the last copy has its gradient. Until then the copies' gradients lie beside those of
    earlier micro-batches, and at the end beside the sums.
    """

    def at(self, moment: Moment) -> RankBytes:
        """Live bytes, and the copies' gradients."""
        model, live = self.model, list(moment.live)
        if moment.is_last:
            live[GRADS] += model.before_optimizer[GRADS] * (2 if moment.micro > 1 else 1)
        elif moment.backward and moment.micro > 1 and moment.position is not None:
            live[GRADS] += model.gradient_width * model.size_after(moment.position)
        return RankBytes(*live)


class FullySharded(MemoryRule):
    """FSDP2: each rank keeps a shard of everything.

    A block is gathered while it computes; parameters outside of the blocks stay gathered. In the backward the next
    block is gathered ahead, and the last block's gradients lie in the reduction buffer. Gradients outside of the blocks
    are reduced last and stay whole until then.
    """

    def at(self, moment: Moment) -> RankBytes:
        """Shards, the gathered part of the model, and gradients that are not reduced yet."""
        model, live = self.model, RankBytes(*moment.live)
        # The step is traced with the gathered weights, and gradients have their width until they are reduced.
        gathered_width = self.formats.compute_bytes if self.formats.is_mixed else model.weight_width
        made_grads = live.grads / gathered_width
        whole_grads = made_grads if self.accumulates else max(0.0, made_grads - self._reduced_grads(moment, made_grads))
        whole_width = model.gradient_width if self.accumulates else gathered_width
        block = model.size_of(moment.position)
        communication = gathered_width * (model.outside_blocks + block)
        if self.knobs.get("reshard") == "off":
            communication = gathered_width * model.parameters
        elif moment.backward:
            communication += gathered_width * block
        if moment.backward:
            communication += FP32_BYTES * block
        return RankBytes(
            params=live.params / self.ranks,
            grads=whole_grads * whole_width + (made_grads - whole_grads) * model.gradient_width / self.ranks,
            optimizer=live.optimizer / self.ranks,
            activations=live.activations,
            temporary=live.temporary,
            communication=communication,
        )

    def in_optimizer(self, live: Vector) -> RankBytes:
        """Shards of everything but the batch."""
        shards = RankBytes(*(value / self.ranks for value in live))
        return shards._replace(activations=live[ACTIVATIONS])

    def _reduced_grads(self, moment: Moment, made_grads: float) -> float:
        """Elements of the gradients of the blocks whose backward is over."""
        if not moment.backward:
            return made_grads
        if moment.position is None:
            block_grads = sum(self.model.block_sizes)
            return block_grads if made_grads >= block_grads else 0.0
        return self.model.size_after(moment.position)


class ZeroPartitioned(MemoryRule):
    """ZeRO-1 and -2: whole weights, the rank's part of the master weights and states, one bucket of gradients.

    The bucket holds the whole model's gradients (`reduce_bucket_size`). Both stages take the same memory: stage 1 keeps
    the other ranks' gradients in the bucket.
    """

    def __init__(self, model: WholeModel, ranks: int, knobs: Mapping[str, Any]) -> None:
        super().__init__(model, ranks, knobs)
        # Weights are half for the half precisions, whatever the trace had.
        self.width = self.formats.compute_bytes
        self.weights = float(self.width * model.parameters)
        master_width = self.formats.weight_bytes
        self.masters = master_width * model.parameters / self.ranks
        self.states = model.before_optimizer[OPTIMIZER] * master_width / model.weight_width / self.ranks

    def at(self, moment: Moment) -> RankBytes:
        """Gradients go into the bucket as they come and are reduced from it; the rank's own part is kept."""
        return RankBytes(
            params=self.weights,
            grads=(self.weights if moment.micro > 1 else self._new_grads(moment)) / self.ranks,
            optimizer=self.masters + self.states,
            activations=moment.live[ACTIVATIONS],
            temporary=moment.live[TEMPORARY],
            communication=self._bucket(moment),
        )

    def in_optimizer(self, live: Vector) -> RankBytes:
        """The rank's gradients are copied into one flat tensor of the masters' type beside the reduced ones."""
        return RankBytes(
            params=self.weights,
            grads=self.weights / self.ranks + self.masters,
            optimizer=self.masters + self.states,
            activations=live[ACTIVATIONS],
            temporary=self._scratch(live, self.masters),
        )

    def _bucket(self, moment: Moment) -> float:
        """Bytes of the bucket from the first gradient on: the whole bucket on a GPU, only the written part on a CPU.

        DeepSpeed allocates the bucket when it processes that gradient (stage_1_and_2.py, process_gradients).
        """
        if not moment.backward:
            return 0.0
        new_grads = self._new_grads(moment)
        return self.weights if self.model.on_gpu and (new_grads or moment.position is not None) else new_grads

    def _new_grads(self, moment: Moment) -> float:
        """Bytes of the gradients that the running micro-batch has made."""
        if moment.micro > 1:
            # Earlier micro-batches' gradients stay alive. Outside of the blocks only the start of the backward can be
            # the peak.
            return float(self.width * self.model.size_after(moment.position)) if moment.position is not None else 0.0
        traced_grads = max(1.0, self.model.before_optimizer[GRADS])
        return min(self.weights, moment.live[GRADS] * self.weights / traced_grads)

    def _scratch(self, live: Vector, flat_bytes: float) -> float:
        """Temporary bytes of the update of a flat tensor."""
        if not self.model.is_updated_in_loop(self.knobs, live[TEMPORARY]):
            # All parameters at a time, foreach.
            return live[TEMPORARY] * flat_bytes / self.model.before_optimizer[PARAMS]
        return loop_scratch(self.knobs) * flat_bytes if live[TEMPORARY] else 0.0

    def _host_scratch(self, live: Vector, flat_bytes: float) -> float:
        """Temporary bytes of an update on the host: none with DeepSpeed's own AdamW, else those of torch's loop."""
        has_none = self.knobs["optimizer"] == "adamw" or not live[TEMPORARY]
        return 0.0 if has_none else loop_scratch(self.knobs) * flat_bytes


class ZeroParameters(ZeroPartitioned):
    """ZeRO-3: weights are partitioned too, and at most two parts of the model are gathered.

    One bucket of a part's gradients is there from the start; a single rank gathers nothing (partition_parameters.py,
    `_no_gather_coalesced`).
    """

    @property
    def largest_part(self) -> float:
        """Bytes of the largest part: a block, or everything outside of the blocks."""
        return float(self.width * max([self.model.outside_blocks, *self.model.block_sizes]))

    @property
    def largest_group(self) -> float:
        """Bytes in the masters' type of the largest group of parameters that is updated at once."""
        return min(self.masters, FP32_BYTES * self.largest_part / self.width)

    def at(self, moment: Moment) -> RankBytes:
        """Parts, the bucket, the gathered weights, and a part's gradients from the first of them on."""
        makes_grads = moment.backward and (moment.position is not None or self._new_grads(moment) > 0)
        return RankBytes(
            params=self.weights / self.ranks,
            grads=self.weights / self.ranks,
            optimizer=self.masters + self.states,
            activations=moment.live[ACTIVATIONS],
            temporary=moment.live[TEMPORARY],
            communication=(1 + self._gathered_parts + makes_grads) * self.largest_part,
        )

    def in_optimizer(self, live: Vector) -> RankBytes:
        """Groups no larger than the largest part are cast, updated and gathered one after another."""
        return RankBytes(
            params=self.weights / self.ranks,
            grads=self.weights / self.ranks + self.largest_group,
            optimizer=self.masters + self.states,
            activations=live[ACTIVATIONS],
            temporary=self._scratch(live, self.largest_group),
            communication=(1 + min(1, self._gathered_parts)) * self.largest_part,
        )

    @property
    def _gathered_parts(self) -> int:
        return 2 if self.ranks > 1 else 0


class ZeroOffloaded(ZeroPartitioned):
    """ZeRO-2 with offload: weights, bucket and staging buffers on the device; masters, states and their gradients on
    the host.

    On a CPU, device and host are the same memory.
    """

    def at(self, moment: Moment) -> RankBytes:
        """The host keeps the rank's gradients, and their sum over earlier micro-batches."""
        rank_bytes = self._on_gpu if self.model.on_gpu else self._on_host
        return rank_bytes._replace(
            activations=moment.live[ACTIVATIONS],
            temporary=moment.live[TEMPORARY],
            communication=self._bucket(moment) + (1 if self.model.on_gpu else 2) * self.staging,
        )

    def in_optimizer(self, live: Vector) -> RankBytes:
        """The host updates; new weights are copied to the device and gathered, by gloo into a buffer of its own."""
        if self.model.on_gpu:
            return self._on_gpu._replace(activations=live[ACTIVATIONS], communication=self.staging)
        scratch = self._host_scratch(live, self.masters)
        communication = 2 * self.staging + max(0.0, self.weights - scratch)
        return self._on_host._replace(activations=live[ACTIVATIONS], temporary=scratch, communication=communication)

    @property
    def staging(self) -> float:
        """Bytes of one staging buffer, through which gradients leave the device: the size of the largest parameter."""
        return float(self.width * self.model.largest_parameter)

    @property
    def _on_gpu(self) -> RankBytes:
        return RankBytes(params=self.weights)

    @property
    def _on_host(self) -> RankBytes:
        """Weights, the updated part on its way back to the device, gradients, masters and states."""
        # Gradients of earlier micro-batches are added up in a copy of their own; with half masters in place.
        has_copy = self.accumulates and not self.formats.has_half_weights
        own_weights = self.weights / self.ranks
        grads = self.masters + (own_weights if has_copy else 0.0)
        return RankBytes(params=self.weights + own_weights, grads=grads, optimizer=self.masters + self.states)


class ZeroParametersOffloaded(ZeroParameters):
    """ZeRO-3 with offload: the device holds the gathered weights and the gradients being reduced."""

    def at(self, moment: Moment) -> RankBytes:
        """The host keeps the gradients in both types."""
        rank_bytes = super().at(moment)
        if self.model.on_gpu:
            return rank_bytes._replace(params=0.0, grads=0.0, optimizer=0.0)
        return rank_bytes._replace(grads=rank_bytes.grads + self.masters)

    def in_optimizer(self, live: Vector) -> RankBytes:
        """No states and no update on the device; on a CPU both are in the host's memory, as in ZeRO-3."""
        if self.model.on_gpu:
            return RankBytes(activations=live[ACTIVATIONS])
        grads, scratch = self.weights / self.ranks + self.masters, self._host_scratch(live, self.largest_group)
        return super().in_optimizer(live)._replace(grads=grads, temporary=scratch)


MEMORY_RULES = {"Unshared": MemoryRule} | {
    rule.__name__: rule
    for rule in (
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


def memory_rule(knobs: Mapping[str, Any], ranks: int, model: WholeModel) -> MemoryRule:
    """The rule of the knobs' strategy. Raises UserError for a strategy whose memory is not predicted."""
    strategy = strategy_of(knobs)
    if strategy.memory_rule not in MEMORY_RULES:
        raise UserError(
            f"the memory of strategy={strategy.name} is not predicted",
            key="strategy",
            allowed=list(PREDICTED_STRATEGIES),
        )
    if strategy.is_tensor_parallel:
        ranks //= int(knobs["tp_degree"])
    return MEMORY_RULES[strategy.memory_rule](model, ranks, knobs)


def devices_of(knobs: Mapping[str, Any]) -> int:
    """Number of GPUs of the `devices` knob, 1 on a CPU. Raises UserError if it is unset."""
    devices = knobs["devices"]
    if devices is None:
        raise UserError(f"the memory of strategy={knobs['strategy']} depends on the number of devices", key="devices")
    indexes = gpu_indexes(devices)
    return devices if isinstance(devices, int) else 1 if indexes is None else len(indexes)


def first_gpu_segments(segments: list[Segment], devices: int) -> list[Segment]:
    """Return the step of the first GPU of `dp`, from which batches are scattered and on which outputs are gathered.

    It has its share of the samples in the blocks and all of them in the loss. Everything after the blocks counts as
    the loss, whose logits are nearly all of it.
    """
    first_gpu = []
    kept_of_others = NO_BYTES
    for index, segment in enumerate(segments):
        if segment.phase == "data" or _is_head(segments, index):
            fixed, per_sample = segment.delta
            if segment.phase == "backward":
                # The backward frees the other GPUs' samples that its forward kept.
                delta = add(per_sample, kept_of_others, -1)
                kept_of_others = NO_BYTES
            else:
                delta = add(NO_BYTES, per_sample, devices)
                if segment.phase == "forward":
                    kept_of_others = add(kept_of_others, add(delta, per_sample, -1))
            lines = [
                (fixed_line, add(NO_BYTES, per_sample_line, devices)) for fixed_line, per_sample_line in segment.lines
            ]
            segment = msgspec.structs.replace(segment, lines=lines, delta=(fixed, delta))
        first_gpu.append(segment)
    return first_gpu


def _is_head(segments: list[Segment], index: int) -> bool:
    """True between the last block's forward and that block's backward."""
    if segments[index].traced_block:
        return False
    segment_before = next((segment for segment in reversed(segments[:index]) if segment.traced_block), None)
    segment_after = next((segment for segment in segments[index:] if segment.traced_block), None)
    return (
        segment_before is not None
        and segment_after is not None
        and (segment_before.phase, segment_after.phase) == ("forward", "backward")
    )
