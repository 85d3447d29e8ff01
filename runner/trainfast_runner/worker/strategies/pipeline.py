"""Layers in stages, one rank after the other, by torch.distributed.pipelining; also several pipelines side by side.

`ddp+pp` is a mesh of dp x pp ranks. Each row is a whole pipeline over its own slice of the global batch; gradients are
summed down the columns after the pipeline's backward.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from ..catalog import SCHEDULES
from ..data.samples import Batch
from ..objective import Objective
from ..optimizer import build_optimizer
from ..precision import dtype_name
from ..spec import Knobs
from ..weights import init_weights
from .base import Strategy
from .ddp import join_group
from .pipeline_stages import cut


class PipelineParallel(Strategy):
    """This rank's stages and the schedule that runs them."""

    def __init__(self, knobs: Knobs, device: torch.device) -> None:
        super().__init__(knobs, device)
        self.global_rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.degree = knobs.pp_degree
        self.dp_rank, self.pp_rank = divmod(self.global_rank, self.degree)
        self.dp_degree = world // self.degree
        self.stages = self.degree * SCHEDULES[knobs.pp_schedule].stages_per_rank
        self._schedule: Any = None
        self._tied: list[nn.Parameter] = []
        self._objective: Objective | None = None
        self._targets = torch.ones((), device=device)

    @property
    def dropout_rank(self) -> int:
        """The global rank: stages of one pipeline are different layers."""
        return self.global_rank

    def start(self) -> None:
        """Join the group that torchrun describes, and the groups of this rank's row and column of the mesh."""
        join_group(self.device)
        self._mesh = init_device_mesh(self.device.type, (self.dp_degree, self.degree), mesh_dim_names=("dp", "pp"))
        self._column, self._row = self._mesh.get_group("dp"), self._mesh.get_group("pp")

    def prepare(self, model: nn.Module) -> None:
        """Initialize this rank's stages of `model`, which alone get memory, and make the schedule."""
        knobs = self.knobs
        division = cut(model, self.stages, knobs.seq_len)
        owned = range(self.pp_rank, self.stages, self.degree)
        stages = [division.stage(index) for index in owned]
        for stage in stages:
            stage.autocast = self.precision.autocast
        modules = nn.ModuleList(stages)
        self._tied = division.tied()
        if self._tied:
            # Every rank takes part in making every group.
            ends = [(row * self.degree, (row + 1) * self.degree - 1) for row in range(self.dp_degree)]
            groups = [dist.new_group(list(pair)) for pair in ends]
            self._ends = groups[self.dp_rank]
        init_weights(model, knobs.seed, self.device, modules.modules())
        parts = [
            PipelineStage(module, index, self.stages, self.device, group=self._row)
            for module, index in zip(stages, owned, strict=True)
        ]
        if knobs.pp_schedule == "interleaved":
            self._schedule = ScheduleInterleaved1F1B(
                list(parts), knobs.micro_batches, loss_fn=self._loss, scale_grads=False
            )
        else:
            kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[knobs.pp_schedule]
            self._schedule = kind(parts[0], knobs.micro_batches, loss_fn=self._loss, scale_grads=False)
        if self.precision.scaler is not None:
            # GradScaler makes its scale with the first loss, and only the last stage has one.
            self.precision.scaler.scale(torch.zeros((), device=self.device))
        self.module, self.optimizer = modules, build_optimizer(modules, knobs)

    def forward_backward(
        self, micro_batches: list[Batch], targets: Tensor, objective: Objective, enter: Callable[[str], None]
    ) -> Tensor:
        """Run the schedule, whose forwards and backwards interleave: one phase that cannot be split."""
        # Every rank of a row has the same batch, so `targets`, a column's sum, counts the whole global batch.
        self._objective, self._targets = objective, targets
        enter("forward_backward")
        total = torch.zeros((), device=self.device)
        for batch in micro_batches:
            losses: list[Tensor] = []
            # The schedule takes the inputs on the first stage and the labels on the last.
            inputs = [batch["input_ids"]] if self.pp_rank == 0 else []
            labels = objective.targets(batch) if self._has_last else None
            self._schedule.step(*inputs, target=labels, losses=losses, return_outputs=False)
            if losses:
                total += torch.stack([loss.detach() for loss in losses]).sum()
        scale = self.precision.scale()
        if scale is not None:
            total /= scale
        self._sum_gradients()
        return total

    def optimizer_step(self) -> None:
        """Step as in one process; all stages agree on the norm and on an fp16 overflow."""
        scaler = self.precision.scaler
        if scaler is not None:
            self.precision.unscale(self.optimizer)
            # GradScaler has no public way to say that another rank overflowed.
            for overflowed in scaler._per_optimizer_states[id(self.optimizer)]["found_inf_per_device"].values():
                dist.all_reduce(overflowed, dist.ReduceOp.MAX)
        if self.knobs.grad_clip > 0:
            self.clip_gradients(self.knobs.grad_clip)
        self.precision.step(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)

    def all_reduce(self, value: Tensor) -> Tensor:
        """Sum down the column."""
        if self.dp_degree > 1:
            dist.all_reduce(value, group=self._column)
        return value

    def all_reduce_async(self, value: Tensor) -> Any:
        """Sum over all ranks in the background: only last stages have a loss, the others add zero."""
        return dist.all_reduce(value, async_op=True)

    def clip_gradients(self, max_norm: float) -> None:
        """Clip by the norm over all stages; a tied weight counts once. The formula is `clip_grad_norm_`'s."""
        with_gradients = [parameter for parameter in self.module.parameters() if parameter.grad is not None]
        copies = {id(parameter) for parameter in self._tied} if self._has_last else set()
        squares = torch.zeros((), device=self.device)
        for parameter in with_gradients:
            if parameter.grad is not None and id(parameter) not in copies:
                squares += parameter.grad.float().square().sum()
        dist.all_reduce(squares, group=self._row)
        factor = (max_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        for parameter in with_gradients:
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.dtype))

    def actual_fields(self, module: nn.Module) -> dict[str, Any]:
        """Read the schedule's class, stages and mesh."""
        dtype = dtype_name(next(module.parameters()).dtype)
        sizes = dict(zip(self._mesh.mesh_dim_names or (), self._mesh.mesh.shape, strict=True))
        return {
            "wrapper": type(self._schedule).__name__,
            "reduce_dtype": dtype if self.dp_degree > 1 else None,
            "zero_stage": None,
            "mesh": sizes,
            "pipeline_stages": self._schedule._num_stages,
        }

    def stop(self) -> None:
        """Wait until no rank needs this one any more."""
        dist.barrier()

    @property
    def _has_last(self) -> bool:
        return self.pp_rank == self.degree - 1

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        assert self._objective is not None
        loss = self._objective.sum_of(logits, labels) / self._targets
        scaler = self.precision.scaler
        return loss if scaler is None else scaler.scale(loss)

    def _sum_gradients(self) -> None:
        """Sum a tied weight's gradients over the two ends of a row, then every gradient down the column."""
        if self._tied and self.pp_rank in (0, self.degree - 1):
            for parameter in self._tied:
                dist.all_reduce(parameter.grad, group=self._ends)
        if self.dp_degree > 1:
            gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
            sums = [dist.all_reduce(gradient, group=self._column, async_op=True) for gradient in gradients]
            for work in sums:
                work.wait()
