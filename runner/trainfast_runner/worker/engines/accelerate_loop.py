"""The Accelerate loop of Hugging Face's single-GPU guide: `Accelerator`, `prepare`, `accumulate`, `backward`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from ..data.samples import Batch
from ..loop import to_device
from ..model.optimizer import build_optimizer, rate_at
from ..model.weights import init_weights
from ..records.step_log import StepRecorder
from ..spec import Knobs
from .base import Engine


class AccelerateLoop(Engine):
    """Accelerate wraps, casts, scales and reduces; samples, loss and optimizer are those of the native loop."""

    name = "accelerate"

    def prepare(self, model: nn.Module) -> None:
        """Let `accelerator.prepare` wrap the model and the optimizer that the knob names."""
        init_weights(model, self.knobs.seed, self.strategy.device)
        self.accelerator: Any = Accelerator(
            gradient_accumulation_steps=self.knobs.grad_accum,
            mixed_precision=self.knobs.precision if self.knobs.precision in ("fp16", "bf16") else "no",
            cpu=self.strategy.device.type == "cpu",
        )
        self.module, self.optimizer = self.accelerator.prepare(model, build_optimizer(model, self.knobs))
        # Accelerate's scaler is the one at work: the records show its scale.
        self.strategy.precision.scaler = self.accelerator.scaler

    def live(self) -> tuple[nn.Module, Optimizer]:
        """Return the wrapped module, and the optimizer inside Accelerate's own."""
        return self.module, self.optimizer.optimizer

    def train(self, knobs: Knobs, batches: Iterator[Batch], recorder: StepRecorder) -> None:
        """Take `knobs.steps` optimizer steps."""
        for step in range(1, knobs.steps + 1):
            recorder.begin_step(step)
            rate = rate_at(step, knobs)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            loss = self._take_step(islice(batches, knobs.grad_accum), recorder.enter)
            recorder.enter("other")
            reduced = self.strategy.all_reduce_async(loss)
            recorder.end_step(loss, reduced, self.strategy.precision.scale(), rate)

    def _take_step(self, micro_batches: Iterable[Batch], enter: Callable[[str], None]) -> Tensor:
        """Take one optimizer step, and return this rank's share of the global mean loss."""
        accelerator = self.accelerator
        enter("data")
        batches = [to_device(batch, self.strategy.device) for batch in micro_batches]
        enter("other")
        targets = accelerator.reduce(self.objective.count_targets(batches), "sum").clamp(min=1)
        # `backward` divides by the micro-batches and DDP by the ranks; `targets` has both in it already.
        factor = len(batches) * accelerator.num_processes
        total = torch.zeros((), device=self.strategy.device)
        for batch in batches:
            with accelerator.accumulate(self.module):
                enter("forward")
                loss = self.objective.loss_sum(self.module, batch) / targets
                enter("backward")
                accelerator.backward(loss * factor)
                total += loss.detach()
                if accelerator.sync_gradients:
                    enter("optimizer")
                    if self.knobs.grad_clip > 0:
                        accelerator.clip_grad_norm_(self.module.parameters(), self.knobs.grad_clip)
                # Both do nothing but in the last micro-batch.
                self.optimizer.step()
                self.optimizer.zero_grad()
        return total
