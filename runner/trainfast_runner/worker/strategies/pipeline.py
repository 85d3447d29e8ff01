"""Layers in stages, one rank after the other: torch.distributed.pipelining, and its pipelines side by side.

`ddp+pp` is a mesh of dp x pp ranks. Each row is a whole pipeline over its own slice of the global batch; gradients are
summed down the columns after the pipeline's backward, not while it runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.optim import Optimizer

from ..invalid import InvalidInput
from ..optimizer import build_optimizer
from ..spec import Knobs
from ..weights import draw
from .ddp import join_group
from .pipeline_stages import Stage, cut
from .single import Single

if TYPE_CHECKING:
    from ..loop import Rig

STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2}


class Pipeline(Single):
    """This rank's stages and the schedule that runs them."""

    def __init__(self, knobs: Knobs, device: torch.device) -> None:
        super().__init__(knobs, device)
        self.global_rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.degree = knobs.pp_degree
        check(knobs, world)
        self.rank, self.place = divmod(self.global_rank, self.degree)
        self.ranks = world // self.degree
        self.stages = self.degree * STAGES_PER_RANK[knobs.pp_schedule]
        self._schedule: Any = None
        self._tied: list[nn.Parameter] = []
        self._rig: Rig | None = None
        self._count = torch.ones((), device=device)

    def start(self) -> None:
        """Join the group torchrun describes, and those of this rank's row and column of the mesh."""
        join_group(self.device)
        self._mesh = init_device_mesh(self.device.type, (self.ranks, self.degree), mesh_dim_names=("dp", "pp"))
        self._column, self._row = self._mesh.get_group("dp"), self._mesh.get_group("pp")

    def prepare(self, model: nn.Module, knobs: Knobs) -> tuple[nn.Module, Optimizer]:
        """Draw this rank's stages of `model`, which alone get memory, and make the schedule."""
        division = cut(model, self.stages, knobs.seq_len)
        places = range(self.place, self.stages, self.degree)
        modules = nn.ModuleList(division.stage(index) for index in places)
        self._tied = division.tied()
        if self._tied:
            # Every rank takes part in making every group.
            ends = [(row * self.degree, (row + 1) * self.degree - 1) for row in range(self.ranks)]
            groups = [dist.new_group(list(pair)) for pair in ends]
            self._ends = groups[self.rank]
        draw(model, knobs.seed, self.device, modules.modules())
        parts = [
            PipelineStage(module, index, self.stages, self.device, group=self._row)
            for module, index in zip(modules, places, strict=True)
        ]
        if knobs.pp_schedule == "interleaved":
            self._schedule = ScheduleInterleaved1F1B(
                list(parts), knobs.micro_batches, loss_fn=self._loss, scale_grads=False
            )
        else:
            kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[knobs.pp_schedule]
            self._schedule = kind(parts[0], knobs.micro_batches, loss_fn=self._loss, scale_grads=False)
        return modules, build_optimizer(modules, knobs)

    def accumulate(self, rig: Rig) -> Tensor:
        """The schedule's forwards and backwards, which interleave: one phase that cannot be split."""
        from ..loop import enter, to_device

        if self._rig is None:
            self._begin(rig)
        enter(rig, "data")
        batches = [to_device(next(rig.batches), rig.device) for _ in range(rig.knobs.grad_accum)]
        enter(rig, "other")
        # Every rank of a row has the same batch, so a column's sum is that of the whole global batch.
        self._count = self.sum(rig.objective.count(batches)).clamp(min=1)
        enter(rig, "forward_backward")
        total = torch.zeros((), device=rig.device)
        for batch in batches:
            losses: list[Tensor] = []
            # The schedule takes the inputs on the first stage and the targets on the last.
            inputs = [batch["input_ids"]] if self.place == 0 else []
            target = rig.objective.targets(batch) if self._has_last else None
            self._schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
            if losses:
                total += torch.stack([loss.detach() for loss in losses]).sum()
        scale = rig.precision.scale()
        if scale is not None:
            total /= scale
        self._sum_gradients(rig.module)
        return total

    def update(self, rig: Rig) -> None:
        """As for one process, with the norm and an fp16 overflow agreed on by all stages."""
        scaler = rig.precision.scaler
        if scaler is not None:
            rig.precision.unscale(rig.optimizer)
            # GradScaler has no public way to say that another rank overflowed.
            for found in scaler._per_optimizer_states[id(rig.optimizer)]["found_inf_per_device"].values():
                dist.all_reduce(found, dist.ReduceOp.MAX)
        if rig.knobs.grad_clip > 0:
            self.clip(rig.module.parameters(), rig.knobs.grad_clip)
        rig.precision.step(rig.optimizer)
        rig.optimizer.zero_grad(set_to_none=True)

    def sum(self, value: Tensor) -> Tensor:
        """An all-reduce down the column."""
        if self.ranks > 1:
            dist.all_reduce(value, group=self._column)
        return value

    def sum_later(self, value: Tensor) -> Any:
        """An all-reduce over all ranks, in the background: only last stages have a loss, the others add zero."""
        return dist.all_reduce(value, async_op=True)

    def clip(self, parameters: Iterable[Tensor], max_norm: float) -> None:
        """By the norm over all stages; a tied weight counts once. The formula is `clip_grad_norm_`'s."""
        found = [parameter for parameter in parameters if parameter.grad is not None]
        copies = {id(parameter) for parameter in self._tied} if self._has_last else set()
        squares = torch.zeros((), device=self.device)
        for parameter in found:
            if parameter.grad is not None and id(parameter) not in copies:
                squares += parameter.grad.float().square().sum()
        dist.all_reduce(squares, group=self._row)
        factor = (max_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        for parameter in found:
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.dtype))

    def facts(self, module: nn.Module) -> dict[str, Any]:
        """The schedule's class, and the stages and the mesh it really has."""
        dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
        sizes = dict(zip(self._mesh.mesh_dim_names or (), self._mesh.mesh.shape, strict=True))
        return {
            "wrapper": type(self._schedule).__name__,
            "reduce_dtype": dtype if self.ranks > 1 else None,
            "zero_stage": None,
            "mesh": sizes,
            "pipeline_stages": self._schedule._num_stages,
        }

    def stop(self) -> None:
        """Wait until no rank needs this one any more."""
        dist.barrier()

    @property
    def _has_last(self) -> bool:
        return self.place == self.degree - 1

    def _begin(self, rig: Rig) -> None:
        self._rig = rig
        for module in rig.module.modules():
            if isinstance(module, Stage):
                module.autocast = rig.precision.autocast
        # Stages of one pipeline are different layers: their dropout is to differ too.
        torch.manual_seed(rig.knobs.seed + self.global_rank)
        if rig.precision.scaler is not None:
            # Makes the scale where no loss is scaled.
            rig.precision.scaler.scale(torch.zeros((), device=rig.device))

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        assert self._rig is not None
        loss = self._rig.objective.sum_of(logits, targets) / self._count
        scaler = self._rig.precision.scaler
        return loss if scaler is None else scaler.scale(loss)

    def _sum_gradients(self, module: nn.Module) -> None:
        """A tied weight's gradients over the two ends of a row, then every gradient down the column."""
        if self._tied and self.place in (0, self.degree - 1):
            for parameter in self._tied:
                dist.all_reduce(parameter.grad, group=self._ends)
        if self.ranks > 1:
            gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
            sums = [dist.all_reduce(gradient, group=self._column, async_op=True) for gradient in gradients]
            for one in sums:
                one.wait()


def check(knobs: Knobs, world: int) -> None:
    """Raise InvalidInput where the schedule cannot run: the launcher's rules, for a run file written by hand."""
    degree, chunks = knobs.pp_degree, knobs.micro_batches
    if world % degree or (knobs.strategy == "pp" and world != degree):
        raise InvalidInput(
            f"strategy={knobs.strategy} with pp_degree={degree} cannot use {world} processes", "devices", [str(degree)]
        )
    if knobs.batch_size % chunks:
        raise InvalidInput(
            f"batch_size={knobs.batch_size} cannot be cut into micro_batches={chunks} equal parts", "micro_batches"
        )
    if knobs.pp_schedule == "1f1b" and chunks < degree:
        raise InvalidInput(f"pp_schedule=1f1b needs at least pp_degree={degree} micro_batches", "micro_batches")
    if knobs.pp_schedule == "interleaved" and chunks % max(1, chunks // degree):
        raise InvalidInput(
            f"pp_schedule=interleaved runs micro_batches in rounds of pp_degree={degree}, and {chunks} are not whole",
            "micro_batches",
        )
    if knobs.compile != "off":
        raise InvalidInput("pipeline stages are not compiled here", "compile", ["off"], "off")
