"""Memory of pipeline stages: one process's timeline, cut at the blocks and put in the schedule's order.

A stage keeps its part of the weights, gradients and states, and the activations of the micro-batches it has run forward
and not yet backward. torch's `PipelineStage` also keeps a buffer for each micro-batch's input and for the gradient of
its output, and the last stage the logits until their backward.

Under tensor parallelism the trace and the stages are of one rank's slices. DDP adds its buckets to a stage. FSDP2 keeps
a shard of weights and states; torch's schedules have it gather a block for each forward, keep what a backward has
gathered, and reduce the gradients after the last backward only.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.memory.sharding import LAYERS_SPREAD, devices_of, is_updated_in_loop
from trainfast_runner.memory.timeline import (
    FP32_BYTES,
    MIDDLE_BLOCK,
    NO_BYTES,
    BlockStack,
    PipelineCut,
    RankBytes,
    Segment,
    Vector,
    WholeModel,
    add,
    moments,
)
from trainfast_runner.settings.precisions import PRECISIONS
from trainfast_runner.settings.spec import strategy_of
from trainfast_runner.worker.catalog import SCHEDULES
from trainfast_runner.worker.shared.words import ACTIVATIONS, GRADS, OPTIMIZER, PARAMS, TEMPORARY, TRACED_MICRO_BATCHES

FORWARDS_AHEAD = 2
"""Forwards that an interleaved rank runs ahead for each rank behind it (`_get_warmup_ops` of torch's schedules)."""


class PipelineAction(NamedTuple):
    """A micro-batch's forward or backward; `stage` counts the rank's own stages from 0."""

    stage: int
    backward: bool


class _Pass(NamedTuple):
    """Live bytes of a pass above those before it: at its peak, and at its end."""

    peak: Vector
    delta: Vector


class StagePeaks(NamedTuple):
    """The bytes of the fullest rank of the pipeline in each phase, and the number of that rank."""

    phases: dict[str, RankBytes]
    ranks: dict[str, int]


def stage_count(knobs: Mapping[str, Any]) -> int:
    """Number of stages the model is cut into."""
    if knobs["strategy"] == LAYERS_SPREAD:
        return devices_of(knobs)
    return int(knobs["pp_degree"]) * SCHEDULES[str(knobs["pp_schedule"])].stages_per_rank


def schedule_actions(schedule: str, rank: int, degree: int, micro_batches: int) -> list[PipelineAction]:
    """Return a rank's actions in one step of the schedule."""
    if schedule == "gpipe":
        return [PipelineAction(0, False)] * micro_batches + [PipelineAction(0, True)] * micro_batches
    stages_per_rank = SCHEDULES[schedule].stages_per_rank
    forwards = micro_batches * stages_per_rank
    if schedule == "1f1b":
        round_size = micro_batches
        # The last forward before the first backward counts as the first pair's.
        warmup = min(forwards, degree - rank) - 1
    else:
        # A stage runs `round_size` micro-batches before the rank's next stage does.
        round_size = micro_batches // max(1, micro_batches // degree)
        warmup = min((stages_per_rank - 1) * round_size + FORWARDS_AHEAD * (degree - 1 - rank), forwards)
    stages = [forward // round_size % stages_per_rank for forward in range(forwards)]
    actions = [PipelineAction(stage, False) for stage in stages[:warmup]]
    for index, stage in enumerate(stages):
        actions += [PipelineAction(later, False) for later in stages[warmup + index : warmup + index + 1]]
        # Backwards visit the rank's stages in reverse.
        actions.append(PipelineAction(stages_per_rank - 1 - stage, True))
    return actions


def stage_peaks(model: WholeModel, knobs: Mapping[str, Any], pipelines: int) -> StagePeaks:
    """Return each phase's peak of the fullest stage, of one of `pipelines` side by side.

    Raises UserError for a model not traced for its stages.
    """
    cut, count = model.pipeline, stage_count(knobs)
    if cut is None or len(model.stacks) != 1 or len(cut.stages) != count:
        raise UserError("pipeline memory is predicted only for models with one stack of blocks", key="strategy")
    degree = int(knobs["pp_degree"])
    if knobs["strategy"] == LAYERS_SPREAD:
        # A pipeline without a schedule: the whole batch goes through all stages, and back.
        degree = devices_of(knobs)
        knobs = {**knobs, "pp_schedule": "gpipe", "micro_batches": 1}
    ranks = [_RankMemory(model, cut, knobs, rank, degree, pipelines) for rank in range(degree)]
    peaks = {
        "forward_backward": [rank.forward_backward() for rank in ranks],
        "optimizer": [rank.optimizer() for rank in ranks],
    }
    fullest = {phase: max(range(degree), key=lambda rank: sum(of_ranks[rank])) for phase, of_ranks in peaks.items()}
    return StagePeaks({phase: peaks[phase][rank] for phase, rank in fullest.items()}, fullest)


class _RankMemory:
    """The memory of one rank of the pipeline, which runs every `degree`-th stage."""

    def __init__(
        self, model: WholeModel, cut: PipelineCut, knobs: Mapping[str, Any], rank: int, degree: int, pipelines: int
    ) -> None:
        self._model, self._cut, self._knobs = model, cut, knobs
        self._micro_batches, self._accumulation = int(knobs["micro_batches"]), int(knobs["grad_accum"])
        self._samples = int(knobs["batch_size"]) / self._micro_batches
        self._actions = schedule_actions(str(knobs["pp_schedule"]), rank, degree, self._micro_batches)
        self._stage_numbers = range(rank, len(cut.stages), degree)
        self._elements = sum(cut.stages[number].elements for number in self._stage_numbers)
        self._share = self._elements / max(1, model.parameters)
        strategy = strategy_of(knobs)
        self._is_reduced_in_buckets = strategy.wrapper is not None and strategy.is_pipeline and not strategy.shards
        self._shards = pipelines if strategy.shards else 1
        formats = PRECISIONS[str(knobs["precision"])]
        self._gathered_width = formats.compute_bytes if formats.is_mixed else model.weight_width
        self._last = len(cut.stages) - 1
        self._head = self._last if cut.head is None else cut.head
        self._is_spread = knobs["strategy"] == LAYERS_SPREAD
        self._cached_pass = cache(self._pass)

    def forward_backward(self) -> RankBytes:
        """The rank's bytes at the peak of one step of the schedule, the last of `grad_accum`."""
        accumulates = self._accumulation > 1
        start = [value * self._share for value in self._model.before_optimizer]
        start[ACTIVATIONS], start[TEMPORARY] = self._batches_bytes(), 0.0
        if not accumulates:
            start[GRADS] = 0.0
        if self._shards > 1:
            start[PARAMS], start[GRADS], start[OPTIMIZER] = (
                start[index] / self._shards for index in (PARAMS, GRADS, OPTIMIZER)
            )
        peaks = [RankBytes(*start)]
        level: Vector = tuple(start)
        with_gradients = set[int]()
        for action in self._actions:
            has_gradients = (accumulates and self._shards == 1) or action.stage in with_gradients
            live_bytes = self._cached_pass(action, 2 if has_gradients else 1)
            if action.backward:
                with_gradients.add(action.stage)
            gathered_bytes = self._gathered_bytes(with_gradients, action.stage)
            peaks.append(RankBytes(*add(level, live_bytes.peak))._replace(communication=gathered_bytes))
            level = add(level, live_bytes.delta)
        if self._shards > 1:
            # One group's gradients after the other lie in the buffer that is reduced.
            copied_bytes = FP32_BYTES * max(max(self._groups(number)) for number in self._stage_numbers)
            gathered_bytes = self._gathered_bytes(with_gradients, 0)
            peaks.append(RankBytes(*level)._replace(communication=gathered_bytes + copied_bytes))
        fullest = max(peaks, key=sum)
        return fullest._replace(communication=fullest.communication + self._buffers_bytes())

    def _groups(self, number: int) -> list[int]:
        """Elements that FSDP gathers at once in a stage: those outside of its blocks, and each block."""
        [stack], stage = self._model.stacks, self._cut.stages[number]
        blocks = stack.sizes[stage.begin : stage.end]
        return [stage.elements - sum(blocks), *blocks]

    def _gathered_bytes(self, with_gradients: set[int], running: int) -> float:
        """Bytes of the weights that FSDP has gathered while the rank's stage `running` runs; 0 without it."""
        elements = 0
        for index, number in enumerate(self._stage_numbers if self._shards > 1 else ()):
            groups = self._groups(number)
            if index in with_gradients or self._knobs["reshard"] == "off":
                elements += sum(groups)
            elif index == running:
                elements += groups[0] + max(groups[1:])
        return elements * self._gathered_width

    def optimizer(self) -> RankBytes:
        """The rank's bytes at the peak of the optimizer's step."""
        whole_peak = self._model.optimizer_peak
        peak = [value * self._share for value in whole_peak]
        largest_parameter = max(self._cut.stages[number].largest for number in self._stage_numbers)
        if is_updated_in_loop(self._model, self._knobs, whole_peak[TEMPORARY]):
            # One parameter after the other.
            share = largest_parameter / max(stage.largest for stage in self._cut.stages)
            peak[TEMPORARY] = whole_peak[TEMPORARY] * share
        if float(self._knobs["grad_clip"]) > 0:
            # Each gradient's squares, in fp32.
            peak[TEMPORARY] = max(peak[TEMPORARY], FP32_BYTES * largest_parameter)
        peak = [value / self._shards for value in peak]
        peak[ACTIVATIONS] = self._batches_bytes()
        return RankBytes(*peak)._replace(communication=self._buffers_bytes())

    def _pass(self, action: PipelineAction, micro: int) -> _Pass:
        number = self._stage_numbers[action.stage]
        return self._backward(number, micro) if action.backward else self._forward(number)

    def _forward(self, number: int) -> _Pass:
        """A forward's bytes: it keeps what its backward frees; cast weights are freed with the stage's autocast."""
        before_blocks, blocks, after_blocks = self._segments_by_part(number, "forward", 1)
        before_blocks = before_blocks if number == 0 else []
        after_blocks = after_blocks if number == self._head else []
        peak, _ = self._live_bytes(number, [*before_blocks, *blocks, *after_blocks])
        return _Pass(peak, _vector({ACTIVATIONS: -self._backward(number, 1).delta[ACTIVATIONS]}))

    def _backward(self, number: int, micro: int) -> _Pass:
        """A backward's bytes, in the traced micro-batch `micro`: 1 without earlier gradients, 2 with them."""
        after_blocks, blocks, before_blocks = self._segments_by_part(number, "backward", micro)
        width = self._model.weight_width
        start = NO_BYTES
        segments = [*blocks, *(before_blocks if number == 0 else [])]
        logits_bytes = 0.0
        if number == self._head:
            # The head's gradient does not wait for the gradient of the tied embedding, which is in another stage.
            tied_bytes = width * self._cut.tied
            head_delta = _vector({TEMPORARY: -tied_bytes, GRADS: tied_bytes if micro == 1 else 0.0})
            segments = [*after_blocks, Segment("backward", micro, "", [], (head_delta, NO_BYTES)), *segments]
            if not self._is_spread:
                # torch's `PipelineStage` keeps the logits.
                formats = PRECISIONS[str(self._knobs["precision"])]
                logit_width = formats.compute_bytes if formats.is_mixed else width
                logits_bytes = self._samples * self._cut.output * logit_width
        else:
            start = _vector({TEMPORARY: self._samples * width * self._cut.hidden})
        peak, end = self._live_bytes(number, segments, start)
        return _Pass(peak, _vector({ACTIVATIONS: end[ACTIVATIONS] - logits_bytes, GRADS: end[GRADS]}))

    def _segments_by_part(
        self, number: int, phase: str, micro: int
    ) -> tuple[list[Segment], list[Segment], list[Segment]]:
        """A traced micro-batch's segments before the blocks, in a stage's blocks, and after them, as they run."""
        traced = [segment for segment in self._model.segments if segment.phase == phase and segment.micro == micro]
        block_indexes = [index for index, segment in enumerate(traced) if segment.traced_block]
        if not block_indexes:
            raise UserError("this trace has no blocks to be cut between", key="strategy")
        blocks = [
            msgspec.structs.replace(segment, traced_block=f"0:{index}")
            for index, block in enumerate(self._traced_blocks(number))
            for segment in traced
            if segment.traced_block == f"0:{block}"
        ]
        if phase == "backward":
            blocks.reverse()
        return traced[: block_indexes[0]], blocks, traced[block_indexes[-1] + 1 :]

    def _traced_blocks(self, number: int) -> list[int]:
        """Index of the traced block for each block of the stage; [first, MIDDLE_BLOCK, last] of a long stage."""
        [stack], stage = self._model.stacks, self._cut.stages[number]
        blocks = list(range(stage.begin, stage.end))
        if stack.kept == stack.count:
            return blocks
        ends = {0: 0, stack.count - 1: stack.kept - 1}
        indexes = [ends.get(block, MIDDLE_BLOCK) for block in blocks]
        return indexes if len(indexes) <= stack.kept else [indexes[0], MIDDLE_BLOCK, indexes[-1]]

    def _live_bytes(self, number: int, segments: list[Segment], start: Vector = NO_BYTES) -> tuple[Vector, Vector]:
        """Live bytes of some segments: at their peak and at their end."""
        [stack], stage = self._model.stacks, self._cut.stages[number]
        cut = BlockStack(len(self._traced_blocks(number)), stack.sizes[stage.begin : stage.end])
        lives = [moment.live for moment in moments(segments, [cut], start, self._samples, TRACED_MICRO_BATCHES)]
        return max(lives, key=sum), lives[-1]

    def _batches_bytes(self) -> float:
        """Bytes of the batches themselves; every rank has all of a step."""
        data = [segment.delta for segment in self._model.segments if segment.phase == "data"]
        traced_bytes = sum(sum(fixed) + self._samples * sum(per_sample) for fixed, per_sample in data)
        return traced_bytes * self._micro_batches * self._accumulation / TRACED_MICRO_BATCHES

    def _buffers_bytes(self) -> float:
        """Bytes of the buffers that receive a stage's inputs and the gradients of its outputs, one per micro-batch.

        With those of DDP, which hold a second copy of the gradients.
        """
        # `naive-mp` only copies inputs: gradients come when they are used.
        count = sum((number > 0) + (number != self._last and not self._is_spread) for number in self._stage_numbers)
        received_bytes = count * self._micro_batches * self._samples * self._cut.hidden * self._model.weight_width
        return received_bytes + self._is_reduced_in_buckets * self._elements * self._model.gradient_width


def _vector(values: Mapping[int, float]) -> Vector:
    return tuple(values.get(index, 0.0) for index in range(len(NO_BYTES)))
