"""Layers in stages, one rank after the other, by torch.distributed.pipelining; also several pipelines side by side.

`ddp+pp` is a mesh of dp x pp ranks. Each row is a whole pipeline over its own slice of the global batch; gradients are
summed down the columns after the pipeline's backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from ..catalog import SCHEDULES
from ..data.samples import Batch
from ..model.objective import Objective
from ..model.optimizer import build_optimizer
from ..model.precision import dtype_name
from ..model.weights import init_weights
from ..spec import Knobs
from .mesh import MeshStrategy
from .pipeline_stages import cut


class PipelineParallel(MeshStrategy):
    """This rank's stages and the schedule that runs them."""

    _schedule: Any
    _tied: list[nn.Parameter]
    """Parameters that both the first and the last stage have."""
    _ends: Any
    """The process group of the first and the last rank of this row, if they share parameters."""
    _objective: Objective
    """The objective of the running step, which the schedule's loss function reads."""
    _targets: Tensor
    """The count of targets in the running step's global batch, which the schedule's loss function reads."""

    def __init__(self, knobs: Knobs, device: torch.device) -> None:
        super().__init__(knobs, device, "pp", knobs.pp_degree)

    @property
    def dropout_rank(self) -> int:
        """The global rank: stages of one pipeline are different layers."""
        return self.dp_rank * self.degree + self.axis_rank

    def prepare(self, model: nn.Module) -> None:
        """Initialize this rank's stages of `model`, which alone get memory, and make the schedule."""
        knobs, schedule = self.knobs, SCHEDULES[self.knobs.pp_schedule]
        stage_count = self.degree * schedule.stages_per_rank
        division = cut(model, stage_count, knobs.seq_len)
        owned = range(self.axis_rank, stage_count, self.degree)
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
            pipelining.PipelineStage(module, index, stage_count, self.device, group=self.mesh.get_group("pp"))
            for module, index in zip(stages, owned, strict=True)
        ]
        schedule_class = getattr(pipelining, schedule.wrapper)
        scheduled = parts if schedule.stages_per_rank > 1 else parts[0]
        self._schedule = schedule_class(scheduled, knobs.micro_batches, loss_fn=self._loss, scale_grads=False)
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
            inputs = [batch["input_ids"]] if self._is_first else []
            labels = objective.targets(batch) if self._is_last else None
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

    def all_reduce_async(self, value: Tensor) -> Any:
        """Sum over all ranks in the background: only last stages have a loss, the others add zero."""
        return dist.all_reduce(value, async_op=True)

    def clip_gradients(self, max_norm: float) -> None:
        """Clip by the norm over all stages; a tied weight counts once. The formula is `clip_grad_norm_`'s."""
        gradients = {id(parameter): parameter.grad for parameter in self.module.parameters()}
        copies = {id(parameter) for parameter in self._tied} if self._is_last else set()
        squares = torch.zeros((), device=self.device)
        for key, gradient in gradients.items():
            if gradient is not None and key not in copies:
                squares += gradient.float().square().sum()
        dist.all_reduce(squares, group=self.mesh.get_group("pp"))
        factor = (max_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        for gradient in gradients.values():
            if gradient is not None:
                gradient.mul_(factor.to(gradient.dtype))

    def actual_fields(self, module: nn.Module) -> dict[str, Any]:
        """Read the schedule's class, stages and mesh."""
        dtype = dtype_name(next(module.parameters()).dtype)
        return {
            "wrapper": type(self._schedule).__name__,
            "reduce_dtype": dtype if self.dp_degree > 1 else None,
            "mesh": dict(zip(self.mesh.mesh_dim_names or (), self.mesh.shape, strict=True)),
            "pipeline_stages": self._schedule._num_stages,
        }

    @property
    def _is_first(self) -> bool:
        return self.axis_rank == 0

    @property
    def _is_last(self) -> bool:
        return self.axis_rank == self.degree - 1

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss = self._objective.loss_of_logits(logits, labels) / self._targets
        scaler = self.precision.scaler
        return loss if scaler is None else scaler.scale(loss)

    def _sum_gradients(self) -> None:
        """Sum a tied weight's gradients over the two ends of a row, then every gradient down the column."""
        if self._tied and (self._is_first or self._is_last):
            for parameter in self._tied:
                dist.all_reduce(parameter.grad, group=self._ends)
        if self.dp_degree > 1:
            column = self.mesh.get_group("dp")
            gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
            sums = [dist.all_reduce(gradient, group=column, async_op=True) for gradient in gradients]
            for work in sums:
                work.wait()
