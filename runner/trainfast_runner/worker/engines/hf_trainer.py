"""The Hugging Face Trainer on the same samples and loss: the speed that a script built on the Trainer has."""

import dataclasses
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from ..catalog import LEVERS, OPTIMIZERS, named_fields
from ..data.samples import Batch
from ..levers.checkpointing import ARGUMENTS
from ..loop import to_device
from ..model.optimizer import Objective, build_optimizer, logits_of
from ..model.weights import init_weights
from ..records.step_log import StepRecorder
from ..spec import Knobs
from ..strategies.base import Strategy
from .base import Engine


def _trainer_name(knobs: Knobs) -> str | None:
    """The Trainer's name of the optimizer; None if it gets the optimizer itself: it sees no torchao here."""
    entry = OPTIMIZERS[knobs.optimizer]
    return None if entry.package == "torchao" else entry.trainer_name


def training_arguments(knobs: Knobs, device: torch.device) -> TrainingArguments:
    """The knobs as TrainingArguments, with the Trainer's defaults off (clip at 1.0, a falling rate, logs, checkpoints).

    TF32 is the process's own setting, which `Precision` has made already.
    """
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    checkpointing = dict(LEVERS["checkpointing"][knobs.checkpointing].trainer_fields or ())
    fields: dict[str, Any] = named_fields(
        {"gradient_checkpointing_kwargs": ARGUMENTS, **checkpointing}, names.__contains__
    )
    return TrainingArguments(
        # The folder has to exist; nothing is written into it.
        output_dir=tempfile.gettempdir(),
        max_steps=knobs.steps,
        per_device_train_batch_size=knobs.batch_size,
        gradient_accumulation_steps=knobs.grad_accum,
        learning_rate=knobs.lr,
        lr_scheduler_type=knobs.lr_schedule,
        warmup_steps=0,
        weight_decay=knobs.weight_decay,
        max_grad_norm=knobs.grad_clip,
        optim=_trainer_name(knobs) or "adamw_torch",
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
        **fields,
    )


class HfTrainer(Engine):
    """Takes the steps with a Trainer that is given this run's samples and loss."""

    name = "trainer"

    def prepare(self, model: nn.Module) -> None:
        """Make the Trainer with its optimizer; it wraps the model when it begins to train."""
        device = self.strategy.device
        init_weights(model, self.knobs.seed, device)
        has_name = _trainer_name(self.knobs) is not None
        self.trainer = RecordedTrainer(
            self.strategy,
            self.objective,
            model=model,
            args=training_arguments(self.knobs, device),
            optimizers=(None if has_name else build_optimizer(model, self.knobs), None),
        )
        # The records have everything that this callback would print at the end.
        self.trainer.remove_callback(PrinterCallback)
        self.trainer.add_callback(StepRecords(self.trainer))
        self.trainer.create_optimizer()
        self.strategy.precision.scaler = self.trainer.accelerator.scaler

    def live(self) -> tuple[nn.Module, Optimizer]:
        """Return the module that the Trainer calls now, and the optimizer inside Accelerate's."""
        trainer: Any = self.trainer
        return trainer.model_wrapped, getattr(trainer.optimizer, "optimizer", trainer.optimizer)

    def train(self, knobs: Knobs, batches: Iterator[Batch], recorder: StepRecorder) -> None:
        """Run the Trainer's own loop."""
        self.trainer.batches = MicroBatches(batches, knobs.steps * knobs.grad_accum)
        self.trainer.recorder = recorder
        self.trainer.args.max_steps = knobs.steps
        self.trainer.loss = torch.zeros((), device=self.strategy.device)
        self.trainer.train()


class MicroBatches:
    """A run's micro-batches with the length the Trainer plans by: one epoch of exactly the run's steps."""

    def __init__(self, batches: Iterator[Batch], length: int) -> None:
        self._batches = batches
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        return self._batches


class RecordedTrainer(Trainer):  # type: ignore[misc]
    """The Trainer on this rank's micro-batches; every target of the global batch has the same weight."""

    batches: MicroBatches
    recorder: StepRecorder
    loss: Tensor
    """This rank's share of the global mean loss, summed over the step's micro-batches until now."""

    def __init__(self, strategy: Strategy, objective: Objective, **arguments: Any) -> None:
        self.strategy = strategy
        self.objective = objective
        super().__init__(compute_loss_func=self.weigh, **arguments)

    def get_train_dataloader(self) -> Any:
        """Return the loader that is running already."""
        return self.batches

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], Tensor]:
        """Return a step's micro-batches, and the count of targets in the whole global batch."""
        self.recorder.begin_step(self.state.global_step + 1)
        self.recorder.enter("data")
        batches = [to_device(next(epoch_iterator), device) for _ in range(num_batches)]
        self.recorder.enter("other")
        targets = self.strategy.all_reduce(self.objective.count_targets(batches)).clamp(min=1)
        # The Trainer runs forward and backward in one call: their times cannot be split.
        self.recorder.enter("forward_backward")
        return batches, targets

    def weigh(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        """Return the loss; the Trainer multiplies it by the number of ranks, because DDP averages over them."""
        objective = self.objective
        loss = objective.loss_of_logits(logits_of(outputs), objective.targets({"labels": labels})) / num_items_in_batch
        self.loss += loss.detach()
        return loss


class StepRecords(TrainerCallback):  # type: ignore[misc]
    """Writes the step records from the Trainer's callbacks."""

    def __init__(self, trainer: RecordedTrainer) -> None:
        self._trainer = trainer
        self._rate = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Write the `actual` record before the first step: the model is wrapped now."""
        self._trainer.recorder.write_actual()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Begin the optimizer's phase: gradients are complete, and clipped if asked."""
        self._rate = float(self._trainer.optimizer.param_groups[0]["lr"])
        self._trainer.recorder.enter("optimizer")

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """End the optimizer's phase."""
        self._trainer.recorder.enter("other")

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Record the step: the gradients are free."""
        trainer = self._trainer
        loss, trainer.loss = trainer.loss, torch.zeros_like(trainer.loss)
        reduced = trainer.strategy.all_reduce_async(loss)
        trainer.recorder.end_step(loss, reduced, trainer.strategy.precision.scale(), self._rate)
