"""Pipelines whose stages are cut by tensor parallelism, several side by side: "3D parallelism".

The mesh is dp x pp x tp, with neighbouring ranks along tp, whose exchanges wait most. A stage has the layers that
`pipeline.py` gives it, its matrices are cut as `tensor_parallel.py` cuts a whole model's, and the slice is in
DistributedDataParallel or in FSDP2 over the dp axis. torch's `PipelineStage` keeps both from reducing gradients before
a schedule's last micro-batch (`backward_maybe_with_nosync`, `perform_reduce_grad`): with `grad_accum` they reduce once
for each batch, DDP the sums so far, which a mean of equal parts leaves as they are.
"""

from itertools import chain

from torch import nn

from .base import shard_in_turn
from .pipeline import PipelineParallel, StageModule
from .tensor_parallel import DataTensorParallel, ShardedTensorParallel, TensorParallel


class TensorPipeline(TensorParallel, PipelineParallel):
    """The base of `ddp+tp+pp` and `fsdp+tp+pp`: a pipeline whose stages reduce their gradients themselves."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Make the stages and the schedule; `wrap_stages` cuts their matrices."""
        return PipelineParallel.wrap(self, model)

    def reduce_gradients(self) -> None:
        """Nothing is left to reduce: the stage's wrapper has done it in the backward of the last micro-batch."""


class DataTensorPipeline(TensorPipeline, DataTensorParallel):
    """`ddp+tp+pp`: the same slice of a stage on every data-parallel rank, in DistributedDataParallel."""

    def wrap_stages(self, model: nn.Module, stages: list[StageModule]) -> list[nn.Module]:
        """Initialize and cut these stages of `model`, and put each into DDP over the `dp` axis."""
        for _ in self.cut_in_turn(model, _modules(stages)):
            pass
        wrapped = [self.data_parallel(stage) for stage in stages]
        for stage in wrapped:
            # `PipelineStage` begins the reduction itself. torch 2.13's forward that only finds shapes is outside of its
            # `no_sync`, and would have the first micro-batch reduced.
            stage.require_backward_grad_sync = False
        return list(wrapped)


class ShardedTensorPipeline(TensorPipeline, ShardedTensorParallel):
    """`fsdp+tp+pp`: each slice of a stage is cut again over the data-parallel ranks."""

    def wrap_stages(self, model: nn.Module, stages: list[StageModule]) -> list[nn.Module]:
        """Initialize and cut these stages of `model`, and shard their slices by FSDP over the `dp` axis."""
        shard_in_turn(list(stages), self.cut_in_turn(model, _modules(stages)), self.mesh["dp"], self.knobs)
        return list(stages)


def _modules(stages: list[StageModule]) -> chain[nn.Module]:
    return chain.from_iterable(stage.modules() for stage in stages)
