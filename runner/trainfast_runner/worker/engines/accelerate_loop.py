"""The Accelerate loop of Hugging Face's single-GPU guide: `Accelerator`, `prepare`, `accumulate`, `backward`."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from ..data.samples import Batch
from ..model.optimizer import Objective, build_optimizer
from ..model.weights import init_weights
from .base import Engine


class AccelerateLoop(Engine):
    """Accelerate wraps, casts, scales and reduces; samples, loss and optimizer are those of the native loop."""

    name = "accelerate"

    def prepare(self, model: nn.Module) -> None:
        """Let `accelerator.prepare` wrap the model and the optimizer that the knob names, for the strategy's steps."""
        strategy = self.strategy
        init_weights(model, self.knobs.seed, strategy.device)
        self.accelerator: Any = Accelerator(
            gradient_accumulation_steps=self.knobs.grad_accum,
            mixed_precision=self.knobs.precision if self.knobs.precision in ("fp16", "bf16") else "no",
            cpu=strategy.device.type == "cpu",
        )
        strategy.module, strategy.optimizer = self.accelerator.prepare(model, build_optimizer(model, self.knobs))
        # Accelerate's scaler is the one at work: the records show its scale.
        strategy.precision.scaler = self.accelerator.scaler
        strategy.forward_backward = self._forward_backward
        strategy.optimizer_step = self._optimizer_step  # type: ignore[method-assign]

    def live(self) -> tuple[nn.Module, Optimizer]:
        """Return the wrapped module, and the optimizer inside Accelerate's own."""
        accelerated: Any = self.strategy.optimizer
        return self.strategy.module, accelerated.optimizer

    def _forward_backward(
        self, batches: list[Batch], targets: Tensor, objective: Objective, enter: Callable[[str], None]
    ) -> Tensor:
        accelerator, module = self.accelerator, self.strategy.module
        # `backward` divides by the micro-batches and DDP by the ranks; `targets` has both in it already.
        factor = len(batches) * accelerator.num_processes
        total = torch.zeros((), device=self.strategy.device)
        for batch in batches:
            with accelerator.accumulate(module):
                enter("forward")
                loss = objective.loss_sum(module, batch) / targets
                enter("backward")
                accelerator.backward(loss * factor)
                total += loss.detach()
        return total

    def _optimizer_step(self) -> None:
        strategy = self.strategy
        if self.knobs.grad_clip > 0:
            self.accelerator.clip_grad_norm_(strategy.module.parameters(), self.knobs.grad_clip)
        strategy.optimizer.step()
        strategy.optimizer.zero_grad()
