"""Memory of pipeline stages: one process's timeline, cut at the blocks and put in the schedule's order.

A stage keeps its part of the weights, gradients and states, and the activations of the micro-batches it has run forward
and not yet backward. torch's `PipelineStage` also keeps a buffer for each micro-batch's input and for the gradient of
its output, and the last stage the logits until their backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.memory.model_size import FP32_BYTES
from trainfast_runner.memory.sharding import LAYERS_SPREAD, WholeModel, devices_of
from trainfast_runner.memory.timeline import (
    MIDDLE_BLOCK,
    NO_BYTES,
    BlockStack,
    RankBytes,
    Segment,
    Vector,
    add,
    moments,
)
from trainfast_runner.settings.precisions import PRECISIONS
from trainfast_runner.worker.catalog import SCHEDULES
from trainfast_runner.worker.shared.words import ACTIVATIONS, GRADS, TEMPORARY, TRACED_MICRO_BATCHES

FORWARDS_AHEAD = 2
"""Forwards that an interleaved rank runs ahead for each rank behind it (`_get_warmup_ops` of torch's schedules)."""


class StageCut(msgspec.Struct, frozen=True):
    """One stage of the model."""

    begin: int
    """Index of the first block."""
    end: int
    """Index after that of the last block."""
    elements: int
    """Elements of all parameters of the stage."""
    largest: int
    """Elements of the largest parameter."""


class PipelineCut(msgspec.Struct, frozen=True):
    """The worker's cut of the model into stages."""

    stages: list[StageCut]
    tied: int
    """Elements of the parameters that are on the first and on the last stage."""
    hidden: int
    """Elements per sample of the tensors between stages."""
    output: int
    """Elements per sample of the logits."""
    head: int | None = None
    """The stage that computes the logits; None for the last."""


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


def _as_one_pipeline(knobs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Describe `naive-mp` as a pipeline without a schedule: the whole batch goes through all stages, and back."""
    if knobs["strategy"] != LAYERS_SPREAD:
        return knobs
    return {**knobs, "pp_degree": devices_of(knobs), "pp_schedule": "gpipe", "micro_batches": 1}


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


def stage_peaks(
    model: WholeModel,
    segments: list[Segment],
    optimizer_peak: list[float],
    cut: PipelineCut | None,
    knobs: Mapping[str, Any],
) -> StagePeaks:
    """Return each phase's peak of the fullest stage. Raises UserError for a model not traced for its stages."""
    count = stage_count(knobs)
    if cut is None or len(model.stacks) != 1 or len(cut.stages) != count:
        raise UserError("pipeline memory is predicted only for models with one stack of blocks", key="strategy")
    knobs = _as_one_pipeline(knobs)
    degree = int(knobs["pp_degree"])
    phases: dict[str, RankBytes] = {}
    ranks: dict[str, int] = {}
    for rank in range(degree):
        rank_memory = _RankMemory(model, segments, cut, knobs, rank)
        for phase, peak in (
            ("forward_backward", rank_memory.forward_backward()),
            ("optimizer", rank_memory.optimizer(optimizer_peak)),
        ):
            if phase not in phases or sum(peak) > sum(phases[phase]):
                phases[phase], ranks[phase] = peak, rank
    return StagePeaks(phases, ranks)


class _RankMemory:
    """The memory of one rank of the pipeline, which runs every `degree`-th stage."""

    def __init__(
        self, model: WholeModel, segments: list[Segment], cut: PipelineCut, knobs: Mapping[str, Any], rank: int
    ) -> None:
        degree, micro_batches = int(knobs["pp_degree"]), int(knobs["micro_batches"])
        self._model, self._segments, self._cut, self._knobs = model, segments, cut, knobs
        self._actions = schedule_actions(str(knobs["pp_schedule"]), rank, degree, micro_batches)
        self._stage_numbers = range(rank, len(cut.stages), degree)
        self._share = sum(cut.stages[number].elements for number in self._stage_numbers) / max(1, model.parameters)
        self._micro_batches, self._samples = micro_batches, int(knobs["batch_size"]) / micro_batches
        self._is_spread = knobs["strategy"] == LAYERS_SPREAD
        self._passes: dict[tuple[PipelineAction, int], _Pass] = {}

    def forward_backward(self) -> RankBytes:
        """The rank's bytes at the peak of one step of the schedule, the last of `grad_accum`."""
        accumulates = int(self._knobs["grad_accum"]) > 1
        start = [value * self._share for value in self._model.before_optimizer]
        start[ACTIVATIONS], start[TEMPORARY] = self._batches_bytes(), 0.0
        if not accumulates:
            start[GRADS] = 0.0
        level = peak = tuple(start)
        with_gradients = set[int]()
        for action in self._actions:
            live_bytes = self._pass(action, 2 if accumulates or action.stage in with_gradients else 1)
            peak = max(peak, add(level, live_bytes.peak), key=sum)
            level = add(level, live_bytes.delta)
            if action.backward:
                with_gradients.add(action.stage)
        return RankBytes(*peak)._replace(communication=self._buffers_bytes())

    def optimizer(self, whole_peak: list[float]) -> RankBytes:
        """The rank's bytes at the peak of the optimizer's step, where the whole model has `whole_peak`."""
        peak = [value * self._share for value in whole_peak]
        largest_parameter = max(self._cut.stages[number].largest for number in self._stage_numbers)
        if self._model.is_updated_in_loop(self._knobs, whole_peak[TEMPORARY]):
            # One parameter after the other.
            peak[TEMPORARY] = (
                whole_peak[TEMPORARY] * largest_parameter / max(stage.largest for stage in self._cut.stages)
            )
        if float(self._knobs["grad_clip"]) > 0:
            # Each gradient's squares, in fp32.
            peak[TEMPORARY] = max(peak[TEMPORARY], FP32_BYTES * largest_parameter)
        peak[ACTIVATIONS] = self._batches_bytes()
        return RankBytes(*peak)._replace(communication=self._buffers_bytes())

    def _pass(self, action: PipelineAction, micro: int) -> _Pass:
        key = (action, micro)
        if key not in self._passes:
            self._passes[key] = self._backward(action.stage, micro) if action.backward else self._forward(action.stage)
        return self._passes[key]

    def _forward(self, slot: int) -> _Pass:
        """A forward's bytes: it keeps what its backward frees; cast weights are freed with the stage's autocast."""
        number = self._stage_numbers[slot]
        before_blocks, blocks, after_blocks = self._segments_by_part(number, "forward", 1)
        peak, _ = self._live_bytes(
            number, [*(before_blocks if number == 0 else []), *blocks, *(after_blocks if self._is_head(number) else [])]
        )
        freed = self._backward(slot, 1).delta[ACTIVATIONS]
        return _Pass(peak, _vector({ACTIVATIONS: -freed}))

    def _backward(self, slot: int, micro: int) -> _Pass:
        """A backward's bytes, in the traced micro-batch `micro`: 1 without earlier gradients, 2 with them."""
        number = self._stage_numbers[slot]
        after_blocks, blocks, before_blocks = self._segments_by_part(number, "backward", micro)
        width = self._model.weight_width
        start = NO_BYTES
        segments = [*blocks, *(before_blocks if number == 0 else [])]
        logits_bytes = 0.0
        if self._is_head(number):
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
        traced_segments = [segment for segment in self._segments if segment.phase == phase and segment.micro == micro]
        block_indexes = [index for index, segment in enumerate(traced_segments) if segment.traced_block]
        if not block_indexes:
            raise UserError("this trace has no blocks to be cut between", key="strategy")
        traced_blocks = self._traced_blocks(number)
        blocks = [
            msgspec.structs.replace(segment, traced_block=f"0:{index}")
            for index, block in enumerate(traced_blocks)
            for segment in traced_segments
            if segment.traced_block == f"0:{block}"
        ]
        if phase == "backward":
            blocks.reverse()
        return traced_segments[: block_indexes[0]], blocks, traced_segments[block_indexes[-1] + 1 :]

    def _traced_blocks(self, number: int) -> list[int]:
        """Index of the traced block for each block of the stage; [first, MIDDLE_BLOCK, last] of a long stage."""
        [stack], stage = self._model.stacks, self._cut.stages[number]
        blocks = list(range(stage.begin, stage.end))
        if stack.kept == stack.count:
            return blocks
        indexes = [
            0 if block == 0 else stack.kept - 1 if block == stack.count - 1 else MIDDLE_BLOCK for block in blocks
        ]
        return indexes if len(indexes) <= stack.kept else [indexes[0], MIDDLE_BLOCK, indexes[-1]]

    def _live_bytes(self, number: int, segments: list[Segment], start: Vector = NO_BYTES) -> tuple[Vector, Vector]:
        """Live bytes of some segments: at their peak and at their end."""
        [stack], stage = self._model.stacks, self._cut.stages[number]
        cut = BlockStack(len(self._traced_blocks(number)), stack.sizes[stage.begin : stage.end])
        moments_of_run = moments(segments, [cut], start, self._samples, TRACED_MICRO_BATCHES)
        lives = [moment.live for moment in moments_of_run]
        return max(lives, key=sum), lives[-1]

    def _is_last(self, number: int) -> bool:
        return number == len(self._cut.stages) - 1

    def _is_head(self, number: int) -> bool:
        return number == self._cut.head if self._cut.head is not None else self._is_last(number)

    def _batches_bytes(self) -> float:
        """Bytes of the batches themselves; every rank has all of a step."""
        data = [segment.delta for segment in self._segments if segment.phase == "data"]
        traced_bytes = sum(sum(fixed) + self._samples * sum(per_sample) for fixed, per_sample in data)
        return traced_bytes * self._micro_batches * int(self._knobs["grad_accum"]) / TRACED_MICRO_BATCHES

    def _buffers_bytes(self) -> float:
        """Bytes of the buffers that receive a stage's inputs and the gradients of its outputs, one per micro-batch."""
        # `naive-mp` only copies inputs: gradients come when they are used.
        count = sum(
            (number > 0) + (not self._is_last(number) and not self._is_spread) for number in self._stage_numbers
        )
        return count * self._micro_batches * self._samples * self._cut.hidden * self._model.weight_width


def _vector(values: Mapping[int, float]) -> Vector:
    return tuple(values.get(index, 0.0) for index in range(len(NO_BYTES)))
