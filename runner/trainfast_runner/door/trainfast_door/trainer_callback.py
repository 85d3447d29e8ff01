"""Steps of the Hugging Face Trainer, by a callback in its public list of default callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .notes import never_raises
from .step_log import FACTS_AFTER

if TYPE_CHECKING:
    from .script_run import ScriptRun

HF_TRAINER = "HF Trainer"
"""The Hugging Face Trainer, as a run's framework is recorded."""
OPTIMIZER_BY_TRAINER_NAME = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw-fused",
    "adamw_bnb_8bit": "adamw-8bit",
    "adamw_8bit": "adamw-8bit",
    "paged_adamw_8bit": "paged-adamw-8bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
}
"""The knob's value by the Trainer's name of an optimizer."""


def install(module: Any, run: ScriptRun) -> None:
    """Add the callback to `transformers.trainer`, the module."""

    class TrainerSteps(module.TrainerCallback):  # type: ignore[misc]
        """Counts the Trainer's steps. Properties of its arguments, microseconds each, are read once in a training."""

        asked_samples, reads_left = 1, 0

        @never_raises
        def on_train_begin(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
            run.steps.count_steps_of(HF_TRAINER)
            # The loss of a step is logged after its end.
            run.steps.waits_for_loss = True
            run.ran.update(knobs_of_arguments(args))
            # `auto_find_batch_size` begins again with a smaller batch.
            run.steps.turns.restart()
            batch = getattr(state, "train_batch_size", None) or args.train_batch_size
            self.asked_samples = batch * args.gradient_accumulation_steps
            # Under DataParallel the batch is split among the GPUs.
            run.ran["batch_size"] = batch // max(1, args.n_gpu)
            self.reads_left = FACTS_AFTER

        @never_raises
        def on_step_end(self, args: Any, state: Any, control: Any, **_more: Any) -> Any:
            if self.reads_left:
                self.reads_left -= 1
                if run.steps.turns.batch_size:
                    run.ran["batch_size"] = run.steps.turns.batch_size // max(1, args.n_gpu)
                run.actual.update(compute_dtype_of_arguments(args))
            if run.steps.record_step(samples=run.steps.samples_beside(self.asked_samples)):
                control.should_training_stop = True
            return control

        @never_raises
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_more: Any) -> None:
            if logs and "loss" in logs:
                run.steps.add_loss(float(logs["loss"]))

        @never_raises
        def on_train_end(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
            run.end_training()

    module.DEFAULT_CALLBACKS.append(TrainerSteps)


def knobs_of_arguments(args: Any) -> dict[str, Any]:
    """Values of the knobs that TrainingArguments set."""
    optimizer = getattr(args.optim, "value", args.optim)
    return {
        "grad_accum": args.gradient_accumulation_steps,
        "precision": _precision(args),
        "checkpointing": "full" if args.gradient_checkpointing else "off",
        "workers": args.dataloader_num_workers,
        "pin_memory": "on" if args.dataloader_pin_memory else "off",
        "lr": args.learning_rate,
        "weight_decay": args.weight_decay,
        "grad_clip": args.max_grad_norm,
        "seed": args.seed,
        "prefetch": args.dataloader_prefetch_factor,
        "lr_schedule": getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type),
        # With accumulation our max-autotune is the Trainer's mode without CUDA graphs.
        "compile": (args.torch_compile_mode or "default").replace("-no-cudagraphs", "")
        if args.torch_compile
        else "off",
        "optimizer": OPTIMIZER_BY_TRAINER_NAME.get(optimizer, optimizer),
    }


def _precision(args: Any) -> str:
    if args.bf16:
        return "bf16"
    if args.fp16:
        return "fp16"
    return "tf32" if getattr(args, "tf32", None) else "fp32"


def compute_dtype_of_arguments(args: Any) -> dict[str, str]:
    """The dtype of mixed precision as a field of `actual`; empty without it."""
    if args.bf16:
        return {"compute_dtype": "bfloat16"}
    return {"compute_dtype": "float16"} if args.fp16 else {}
