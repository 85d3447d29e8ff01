"""The Hugging Face Trainer on the same spec: what a training script that ends up there will see."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from ..catalog import OPTIMIZERS
from ..clock import StepTimes
from ..data.samples import Batch
from ..loop import Rig, enter, to_device
from ..objective import logits_of
from ..optimizer import optimizer_class
from ..precision import Precision
from ..spec import Knobs
from ..strategies import Strategy
from ..weights import draw


def training_arguments(knobs: Knobs, device: torch.device) -> TrainingArguments:
    """The knobs as TrainingArguments. What the Trainer would otherwise do unasked (clip at 1.0, let the rate fall,
    log, save, report) is set off; TF32 is the process's own setting, made already."""
    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    checkpointing = "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"
    return TrainingArguments(
        # It has to exist; nothing is written into it.
        output_dir=tempfile.gettempdir(),
        max_steps=knobs.steps,
        per_device_train_batch_size=knobs.batch_size,
        gradient_accumulation_steps=knobs.grad_accum,
        learning_rate=knobs.lr,
        lr_scheduler_type=knobs.lr_schedule,
        warmup_steps=0,
        weight_decay=knobs.weight_decay,
        max_grad_norm=knobs.grad_clip,
        optim=OPTIMIZERS[knobs.optimizer].trainer or "adamw_torch",
        seed=knobs.seed,
        bf16=knobs.precision == "bf16",
        fp16=knobs.precision == "fp16",
        dataloader_num_workers=knobs.workers,
        dataloader_pin_memory=knobs.pin_memory == "on",
        dataloader_prefetch_factor=knobs.prefetch if knobs.workers else None,
        dataloader_persistent_workers=knobs.workers > 0,
        # Every parameter has a gradient here; looking for those without costs a pass over the graph each step.
        ddp_find_unused_parameters=False,
        average_tokens_across_devices=True,
        remove_unused_columns=False,
        use_cpu=device.type == "cpu",
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **{checkpointing: knobs.checkpointing == "full", f"{checkpointing}_kwargs": {"use_reentrant": False}},
    )


class HfTrainer:
    """A Trainer that is given this run's samples and loss, and whose steps are recorded."""

    name = "trainer"

    def __init__(self, knobs: Knobs, strategy: Strategy, device: torch.device, precision: Precision) -> None:
        self.knobs = knobs
        self.device = device
        self.precision = precision

    def prepare(self, model: nn.Module) -> tuple[nn.Module, Optimizer]:
        """The Trainer with its optimizer; it wraps the model when it begins to train."""
        draw(model, self.knobs.seed, self.device)
        entry = OPTIMIZERS[self.knobs.optimizer]
        # One that the Trainer has no name for is given as a class with its arguments.
        chosen = None if entry.trainer else (optimizer_class(entry), {"lr": self.knobs.lr, **dict(entry.arguments)})
        self.trainer = RecordedTrainer(
            model=model,
            args=training_arguments(self.knobs, self.device),
            optimizer_cls_and_kwargs=chosen,
            callbacks=[StepRecords(self)],
        )
        # What it would print at the end is in the records.
        self.trainer.remove_callback(PrinterCallback)
        self.trainer.create_optimizer()
        self.precision.scaler = self.trainer.accelerator.scaler
        return self.live()

    def live(self) -> tuple[nn.Module, Optimizer]:
        """The module the Trainer calls now, and the optimizer inside Accelerate's."""
        trainer: Any = self.trainer
        return trainer.model_wrapped, getattr(trainer.optimizer, "optimizer", trainer.optimizer)

    def train(self, rig: Rig) -> None:
        """The Trainer's own loop."""
        self.trainer.rig = rig
        self.trainer.args.max_steps = rig.knobs.steps
        self.trainer.loss = torch.zeros((), device=rig.device)
        self.trainer.train()


class RecordedTrainer(Trainer):  # type: ignore[misc]
    """The Trainer, fed with this rank's micro-batches; every target of the global batch weighs the same."""

    rig: Rig
    loss: Tensor
    """This rank's share of the step's global mean loss, so far."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(compute_loss_func=self.weigh, **arguments)

    def get_train_dataloader(self) -> Any:
        """The loader that is running already."""
        return MicroBatches(self.rig)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], Tensor]:
        """A step's micro-batches, and how many targets count in the whole global batch."""
        rig = self.rig
        rig.journal.step = self.state.global_step + 1
        enter(rig, "data")
        batches = [to_device(next(epoch_iterator), device) for _ in range(num_batches)]
        enter(rig, "other")
        return batches, rig.strategy.sum(rig.objective.count(batches)).clamp(min=1)

    def weigh(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        """The loss; the Trainer multiplies it by the number of ranks, because DDP averages over them."""
        objective = self.rig.objective
        loss = objective.sum_of(logits_of(outputs), objective.targets({"labels": labels})) / num_items_in_batch
        self.loss += loss.detach()
        return loss


class MicroBatches:
    """The run's micro-batches with the length the Trainer plans by: one epoch of exactly this run's steps."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    def __len__(self) -> int:
        return self._rig.knobs.steps * self._rig.knobs.grad_accum

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._rig.batches)


class StepRecords(TrainerCallback):  # type: ignore[misc]
    """Writes the step records from the Trainer's callbacks."""

    def __init__(self, engine: HfTrainer) -> None:
        self._engine = engine
        self._rate = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Now the model is wrapped: what runs is on record before the first step."""
        self._engine.trainer.rig.after_first_step()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Gradients are complete, and clipped where asked."""
        trainer = self._engine.trainer
        self._rate = trainer.optimizer.param_groups[0]["lr"]
        trainer.rig.memory.boundary("forward_backward")
        enter(trainer.rig, "optimizer")

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """The weights are new."""
        enter(self._engine.trainer.rig, "other")

    def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        """The gradients are freed."""
        trainer, rig, step = self._engine.trainer, self._engine.trainer.rig, state.global_step
        rig.memory.boundary("optimizer")
        loss, trainer.loss = trainer.loss, torch.zeros((), device=rig.device)
        handle = rig.strategy.sum_later(loss)
        times = Unsplit(rig.clock.end_step())
        rig.log.add(step, times, loss, handle, rig.precision.scale(), {"lr": self._rate, **rig.memory.read()})
        if step == 1:
            rig.after_first_step()


class Unsplit:
    """A step's times without forward and backward, which run inside one call of the Trainer: they are in `other`."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times

    def read(self) -> tuple[int, dict[str, Any]]:
        """As the clock's, with null for what is not known."""
        t_ns, fields = self._times.read()
        return t_ns, {**fields, "forward_ms": None, "backward_ms": None}
