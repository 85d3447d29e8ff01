"""The guides' short Accelerate loop: `Accelerator`, `prepare`, `accumulate`, `backward`."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from ..loop import Rig, enter, to_device
from ..optimizer import build_optimizer, rate_at
from ..precision import Precision
from ..spec import Knobs
from ..strategies import Strategy
from ..weights import draw


class AccelerateLoop:
    """Accelerate wraps, casts, scales and exchanges; samples, loss and optimizer are those of the native loop."""

    name = "accelerate"

    def __init__(self, knobs: Knobs, strategy: Strategy, device: torch.device, precision: Precision) -> None:
        self.knobs = knobs
        self.device = device
        self.precision = precision

    def prepare(self, model: nn.Module) -> tuple[nn.Module, Optimizer]:
        """What `accelerator.prepare` makes of the model and of the optimizer the knob names."""
        draw(model, self.knobs.seed, self.device)
        self.accelerator: Any = Accelerator(
            gradient_accumulation_steps=self.knobs.grad_accum,
            mixed_precision=self.knobs.precision if self.knobs.precision in ("fp16", "bf16") else "no",
            cpu=self.device.type == "cpu",
        )
        self.module, self.optimizer = self.accelerator.prepare(model, build_optimizer(model, self.knobs))
        # The scaler that works is Accelerate's: its scale is what the records show.
        self.precision.scaler = self.accelerator.scaler
        return self.live()

    def live(self) -> tuple[nn.Module, Optimizer]:
        """Inside Accelerate's own optimizer is the one that was built."""
        return self.module, self.optimizer.optimizer

    def train(self, rig: Rig) -> None:
        """The loop, with a record of every step."""
        for step in range(1, rig.knobs.steps + 1):
            rig.journal.step = step
            rate = rate_at(step, rig.knobs)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            loss = self._take_step(rig)
            rig.memory.boundary("optimizer")
            enter(rig, "other")
            handle = rig.strategy.sum_later(loss)
            times = rig.clock.end_step()
            rig.log.add(step, times, loss, handle, rig.precision.scale(), {"lr": rate, **rig.memory.read()})
            if step == 1:
                rig.after_first_step()

    def _take_step(self, rig: Rig) -> Tensor:
        """Every micro-batch under `accumulate`; this rank's share of the global mean loss."""
        accelerator = self.accelerator
        enter(rig, "data")
        micro_batches = [to_device(next(rig.batches), rig.device) for _ in range(rig.knobs.grad_accum)]
        enter(rig, "other")
        count = accelerator.reduce(rig.objective.count(micro_batches), "sum").clamp(min=1)
        # `backward` divides by the micro-batches and DDP by the ranks; `count` has both in it already.
        factor = rig.knobs.grad_accum * accelerator.num_processes
        total = torch.zeros((), device=rig.device)
        for batch in micro_batches:
            with accelerator.accumulate(self.module):
                enter(rig, "forward")
                loss = rig.objective.loss_sum(self.module, batch) / count
                enter(rig, "backward")
                accelerator.backward(loss * factor)
                total += loss.detach()
                if accelerator.sync_gradients:
                    rig.memory.boundary("forward_backward")
                    enter(rig, "optimizer")
                    if rig.knobs.grad_clip > 0:
                        accelerator.clip_grad_norm_(self.module.parameters(), rig.knobs.grad_clip)
                # Both do nothing but in the last micro-batch.
                self.optimizer.step()
                self.optimizer.zero_grad()
        return total
