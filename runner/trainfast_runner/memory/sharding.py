"""Memory rules of the strategies: from one process's live bytes to those that each rank keeps and exchanges.

The rules are read from torch 2.13's DistributedDataParallel and fully_shard and from DeepSpeed 0.19's stages as this
product configures them (`strategies/deepspeed_zero.py`), and held against real ranks by
`benchmarks/memory_prediction.py`. A trace cannot replace them: torch 2.13's fake process group refuses DDP, and gives
FSDP2 1,210 MiB where 1,057 ran. Those of one process with several GPUs are read from torch 2.13's `nn/parallel`
(replicate.py, parallel_apply.py, scatter_gather.py, _functions.py) and from the worker's `spread`; no run has been held
against them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.memory.timeline import FP32_BYTES, NO_BYTES, Moment, RankBytes, Segment, WholeModel, add
from trainfast_runner.settings.precisions import PRECISIONS
from trainfast_runner.settings.spec import strategy_of
from trainfast_runner.units import gpu_indexes
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


class Share(NamedTuple):
    """The model, the knobs, and the number of ranks that share the model."""

    model: WholeModel
    knobs: Mapping[str, Any]
    ranks: int

    @property
    def accumulates(self) -> bool:
        """True if gradients live across micro-batches."""
        return int(self.knobs["grad_accum"]) > 1


def loop_scratch(knobs: Mapping[str, Any]) -> int:
    """Copies of a parameter that the optimizer's loop over parameters holds at once."""
    return OPTIMIZERS[str(knobs["optimizer"])].loop_scratch


def is_updated_in_loop(model: WholeModel, knobs: Mapping[str, Any], temporary_bytes: float) -> bool:
    """True if the temporaries of an optimizer's step are those of torch's loop over parameters, not of foreach.

    foreach holds temporaries of all parameters at once, the loop those of one: more than half of the parameters'
    bytes, too, where one embedding is a large part of the model.
    """
    loop_bytes = loop_scratch(knobs) * model.weight_width * model.largest_parameter
    return temporary_bytes <= max(model.before_optimizer[PARAMS] / 2, loop_bytes)


def _replicated(share: Share, moment: Moment) -> RankBytes:
    """DDP: the buckets in which gradients are averaged are a second copy of them, kept from the first step on.

    The second step puts other buckets in their place. NCCL's process group keeps the first ones until its watchdog,
    which looks every 100 ms, has seen their reduction end (torch 2.11, ProcessGroupNCCL.cpp, TensorShelf): where steps
    are shorter than that, the next two have both. On an H200 a model of 225 MiB was predicted 5 % low so, and one of
    8.4 GiB within 0.1 %.
    """
    return RankBytes(*moment.live)._replace(communication=share.model.before_optimizer[GRADS])


def _copied(share: Share, moment: Moment) -> RankBytes:
    """`dp`: the first GPU, which is the fullest; its step is that of `first_gpu_segments`.

    Its own weights are not copied (`broadcast_coalesced` returns the originals). One autograd node makes all copies, so
    its backward starts after the last copy has its gradient. Until then the copies' gradients lie beside those of
    earlier micro-batches, and at the end beside the sums.
    """
    model, live = share.model, list(moment.live)
    if moment.phase == "end":
        live[GRADS] += model.before_optimizer[GRADS] * (2 if moment.micro > 1 else 1)
    elif moment.in_backward and moment.micro > 1 and moment.position is not None:
        live[GRADS] += model.gradient_width * model.size_after(moment.position)
    return RankBytes(*live)


def _fully_sharded(share: Share, moment: Moment) -> RankBytes:
    """FSDP2: each rank keeps a shard of everything.

    A block is gathered while it computes; parameters outside of the blocks stay gathered. In the backward the next
    block is gathered ahead, and the last block's gradients lie in the reduction buffer. Gradients outside of the blocks
    are reduced last and stay whole until then.
    """
    model, live, ranks = share.model, RankBytes(*moment.live), share.ranks
    if moment.phase == "optimizer":
        return RankBytes(*(value / ranks for value in live))._replace(activations=live.activations)
    # The step is traced with the gathered weights, and gradients have their width until they are reduced.
    formats = PRECISIONS[str(share.knobs["precision"])]
    gathered_width = formats.compute_bytes if formats.is_mixed else model.weight_width
    made_grads = reduced_grads = live.grads / gathered_width
    if moment.in_backward and moment.position is not None:
        reduced_grads = model.trained_share * model.size_after(moment.position)
    elif moment.in_backward:
        block_grads = model.trained_share * sum(model.block_sizes)
        reduced_grads = block_grads if made_grads >= block_grads else 0.0
    whole_grads = made_grads if share.accumulates else max(0.0, made_grads - reduced_grads)
    whole_width = model.gradient_width if share.accumulates else gathered_width
    block = 0 if moment.position is None else model.stacks[moment.position.stack].sizes[moment.position.block]
    communication = gathered_width * (model.outside_blocks + block)
    if share.knobs.get("reshard") == "off":
        communication = gathered_width * model.parameters
    elif moment.in_backward:
        communication += gathered_width * block
    if moment.in_backward:
        communication += FP32_BYTES * model.trained_share * block
    return live._replace(
        params=live.params / ranks,
        frozen=live.frozen / ranks,
        grads=whole_grads * whole_width + (made_grads - whole_grads) * model.gradient_width / ranks,
        optimizer=live.optimizer / ranks,
        communication=communication,
    )


def _zero(share: Share, moment: Moment) -> RankBytes:
    """DeepSpeed's ZeRO: the rank's part of the half weights' masters and of their states, and gradients in a bucket.

    Stages 1 and 2 keep whole weights. Their bucket holds the whole model's gradients (`reduce_bucket_size`), and both
    take the same memory: stage 1 keeps the other ranks' gradients in the bucket. Stage 3 gathers at most two parts of
    the model, a single rank none (partition_parameters.py, `_no_gather_coalesced`); its bucket is one part's, and is
    there from the start. Offloaded masters, states and their gradients are on the host, in stage 3 the weights as well;
    on a CPU, device and host are the same memory.
    """
    model, knobs, ranks, live = share.model, share.knobs, share.ranks, moment.live
    strategy, formats = strategy_of(knobs), PRECISIONS[str(knobs["precision"])]
    is_stage_3, on_gpu = "weights" in strategy.shards, model.device == "cuda"
    updates, is_offloaded = moment.phase == "optimizer", strategy.offloads and model.device == "cuda"
    # Weights are half for the half precisions, whatever the trace had.
    width, master_width = formats.compute_bytes, formats.weight_bytes
    weights, own_weights = float(width * model.parameters), float(width * model.parameters) / ranks
    masters = master_width * model.parameters / ranks
    states = model.before_optimizer[OPTIMIZER] * master_width / model.weight_width / ranks
    largest_part = float(width * max([model.outside_blocks, *model.block_sizes]))
    # Stage 3 casts, updates and gathers groups no larger than the largest part one after another.
    updated = min(masters, FP32_BYTES * largest_part / width) if is_stage_3 else masters
    new_grads = _new_grads(model, moment, weights, width)

    temporary = live[TEMPORARY]
    if updates and is_offloaded:
        temporary = 0.0
    elif updates and temporary and strategy.offloads:
        # DeepSpeed's own AdamW has none.
        temporary = 0.0 if knobs["optimizer"] == "adamw" else loop_scratch(knobs) * updated
    elif updates and temporary and is_updated_in_loop(model, knobs, temporary):
        temporary = loop_scratch(knobs) * updated
    elif updates:
        # All parameters at a time, foreach.
        temporary = temporary * updated / model.before_optimizer[PARAMS]

    communication = 0.0
    # Gradients leave the device through buffers of the size of the largest parameter.
    staging = float(width * model.largest_parameter) * ((1 if on_gpu else 2) if strategy.offloads else 0)
    if is_stage_3 and not (updates and is_offloaded):
        gathered_parts = (1 if updates else 2) if ranks > 1 else 0
        makes_grads = moment.in_backward and (moment.position is not None or new_grads > 0)
        communication = (1 + gathered_parts + makes_grads) * largest_part
    elif not is_stage_3 and not updates:
        communication = _bucket(moment, new_grads, weights if on_gpu else 0.0) + staging
    elif not is_stage_3:
        # The host's new weights are copied to the device and gathered, by gloo into a buffer of its own.
        gloo = max(0.0, weights - temporary) if strategy.offloads and not on_gpu else 0.0
        communication = staging + gloo

    if is_offloaded:
        return RankBytes(
            params=0.0 if is_stage_3 else weights,
            activations=live[ACTIVATIONS],
            temporary=temporary,
            communication=communication,
        )
    if strategy.offloads:
        # The host adds up earlier micro-batches' gradients in a copy of their own; with half masters in place.
        has_copy = is_stage_3 or (share.accumulates and not formats.has_half_weights)
        grads = masters + (own_weights if has_copy else 0.0)
    elif updates:
        # The rank's gradients are copied into one flat tensor of the masters' type beside the reduced ones.
        grads = own_weights + updated
    else:
        grads = own_weights if is_stage_3 or moment.micro > 1 else new_grads / ranks
    # An updated part is on its way back to the device.
    whole_weights = weights + (own_weights if strategy.offloads else 0.0)
    return RankBytes(
        params=own_weights if is_stage_3 else whole_weights,
        grads=grads,
        optimizer=masters + states,
        activations=live[ACTIVATIONS],
        temporary=temporary,
        communication=communication,
    )


def _new_grads(model: WholeModel, moment: Moment, weights: float, width: int) -> float:
    """Bytes of the gradients that the running micro-batch has made, in a model of so many bytes of `weights`."""
    if moment.micro > 1:
        # Earlier micro-batches' gradients stay alive. Outside of the blocks only the start of the backward can be
        # the peak.
        return float(width * model.size_after(moment.position)) if moment.position is not None else 0.0
    traced_grads = max(1.0, model.before_optimizer[GRADS])
    return min(weights, moment.live[GRADS] * weights / traced_grads)


def _bucket(moment: Moment, new_grads: float, allocated_bytes: float) -> float:
    """Bytes of the bucket from the first gradient on: the whole bucket on a GPU, only the written part on a CPU.

    DeepSpeed allocates the bucket when it processes that gradient (stage_1_and_2.py, process_gradients).
    """
    if not moment.in_backward:
        return 0.0
    return (allocated_bytes or new_grads) if new_grads or moment.position is not None else new_grads


MEMORY_RULES: dict[str, Callable[[Share, Moment], RankBytes]] = {
    "Unshared": lambda _share, moment: RankBytes(*moment.live),
    "Replicated": _replicated,
    "Copied": _copied,
    "FullySharded": _fully_sharded,
    **dict.fromkeys(("ZeroPartitioned", "ZeroParameters", "ZeroOffloaded", "ZeroParametersOffloaded"), _zero),
}
"""The catalog's `memory_rule`s. Under tensor parallelism the trace is of one rank's part of the model, and the dp axis
shares this part like a whole model."""


def memory_rule(knobs: Mapping[str, Any], ranks: int, model: WholeModel) -> Callable[[Moment], RankBytes]:
    """The rule of the knobs' strategy: from the whole model's live bytes at a moment to those of one rank.

    Raises UserError for a strategy whose memory is not predicted.
    """
    strategy = strategy_of(knobs)
    if strategy.memory_rule not in MEMORY_RULES:
        raise UserError(
            f"the memory of strategy={strategy.name} is not predicted",
            key="strategy",
            allowed=list(PREDICTED_STRATEGIES),
        )
    if strategy.is_tensor_parallel:
        ranks //= int(knobs["tp_degree"])
    return partial(MEMORY_RULES[strategy.memory_rule], Share(model, knobs, max(1, ranks)))


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
    blocks = [index for index, segment in enumerate(segments) if segment.traced_block]
    head = {
        index
        for last, first in pairwise(blocks)
        if (segments[last].phase, segments[first].phase) == ("forward", "backward")
        for index in range(last + 1, first)
    }
    first_gpu = []
    kept_of_others = NO_BYTES
    for index, segment in enumerate(segments):
        if segment.phase == "data" or index in head:
            fixed, per_sample = segment.delta
            delta = add(NO_BYTES, per_sample, devices)
            if segment.phase == "backward":
                # The backward frees the other GPUs' samples that its forward kept.
                delta, kept_of_others = add(per_sample, kept_of_others, -1), NO_BYTES
            elif segment.phase == "forward":
                kept_of_others = add(kept_of_others, add(delta, per_sample, -1))
            lines = [(at_rest, add(NO_BYTES, growth, devices)) for at_rest, growth in segment.lines]
            segment = msgspec.structs.replace(segment, lines=lines, delta=(fixed, delta))
        first_gpu.append(segment)
    return first_gpu
