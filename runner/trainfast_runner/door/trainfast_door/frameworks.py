"""Hooks into the frameworks that count steps themselves, each installed in its module, and those against saving.

| hooked | when | read from it |
|---|---|---|
| `TrainingArguments.__post_init__` | before | nothing: the fields asked for are set, and a trial's own |
| HF Trainer: a callback in `DEFAULT_CALLBACKS` | begin, step, log, end | knobs, steps, losses |
| Lightning: a callback from its entry points `callbacks_factory` | start, batch, end | knobs, steps, samples, losses |
| `DeepSpeedEngine.step` | before and after | steps, stage |
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import sys
from typing import Any

from torch.optim import Optimizer

from .notes import follow, hook_modules, load_from_worker, never_raises, note
from .script_run import ScriptRun, current_run
from .step_hooks import leading_size

DEEPSPEED, HF_TRAINER, LIGHTNING = "DeepSpeed", "HF Trainer", "Lightning"
"""The frameworks, as a run's is recorded."""
SANDBOX_FOLDER = "sandbox"
"""The folder of a trial's own files in the run directory."""
SANDBOX_FIELDS = {
    "save_strategy": "no",
    "eval_strategy": "no",
    "load_best_model_at_end": False,
    "push_to_hub": False,
    "report_to": "none",
    "auto_find_batch_size": False,
}
"""Fields of TrainingArguments that keep a trial from leaving files; versions differ in their fields."""
TRAINER_SYNONYMS = {"adamw_8bit": "adamw_bnb_8bit"}
"""Second names of the Trainer's optimizers."""
PRECISION_BY_LIGHTNING_NAME = {"32-true": "fp32", "16-mixed": "fp16", "bf16-mixed": "bf16", "bf16-true": "bf16-pure"}
"""The knob's value by Lightning's name of a precision."""


def install(run: ScriptRun) -> None:
    """Hook the Trainer, its arguments, and DeepSpeed's engine; in a trial the functions that save too."""
    hooks = {
        "transformers.trainer": install_trainer,
        "transformers.training_args": _set_trainer_fields,
        "deepspeed.runtime.engine": _follow_deepspeed,
    }
    hook_modules({name: functools.partial(hook, run=run) for name, hook in hooks.items()})
    if run.is_trial:
        run.suppressed["experiment trackers"] = None
        hook_modules({name: functools.partial(_silence, names, run) for name, names in SAVE_FUNCTIONS.items()})


def _follow_deepspeed(module: Any, run: ScriptRun) -> None:
    steps_before = 0

    def begin(engine: Any, *_args: Any, **_kwargs: Any) -> None:
        nonlocal steps_before
        steps_before = engine.global_steps
        # A Trainer and Lightning have their own callbacks, and report before the engine's first step.
        if run.framework is None:
            run.count_steps_of(DEEPSPEED)

    def count(_result: Any, engine: Any, *_args: Any, **_kwargs: Any) -> None:
        if engine.global_steps == steps_before:
            return
        # The engine's optimizer holds flat partitions, which belong to no module of the model.
        run.actual.update(wrapper=type(engine).__name__, zero_stage=engine.zero_optimization_stage())
        asked = engine.train_micro_batch_size_per_gpu() * engine.gradient_accumulation_steps()
        if run.source == DEEPSPEED and run.record_step(samples=run.samples_beside(asked)):
            raise SystemExit(0)

    follow(module.DeepSpeedEngine, "step", begin, count)


def _set_trainer_fields(module: Any, run: ScriptRun) -> None:
    asked, sandbox = run.settings.trainer_fields, {}
    if run.is_trial:
        sandbox = {"output_dir": os.path.join(run.files.directory, SANDBOX_FOLDER), **SANDBOX_FIELDS}

    def set_fields(arguments: Any) -> None:
        named = _catalog().named_fields(asked, functools.partial(hasattr, arguments))
        for name, value in {**named, **sandbox}.items():
            given_value = getattr(arguments, name, None)
            if hasattr(arguments, name):
                setattr(arguments, name, value)
            elif name in named:
                note(f"TrainingArguments has no field {name} in this version of transformers")
            if name in sandbox and given_value and given_value != value:
                run.suppressed[f"{name}={given_value}"] = None

    if asked or sandbox:
        follow(module.TrainingArguments, "__post_init__", before=set_fields)


def install_trainer(module: Any, run: ScriptRun) -> None:
    """Add the callback to `transformers.trainer`, the module."""

    class TrainerSteps(module.TrainerCallback):  # type: ignore[misc]
        """Counts the Trainer's steps. Properties of its arguments, microseconds each, are read once in a training."""

        asked_samples = 1

        @never_raises
        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            run.count_steps_of(HF_TRAINER)
            run.planned_steps = getattr(state, "max_steps", None)
            # The loss of a step is logged after its end.
            run.waits_for_loss = True
            batch = getattr(state, "train_batch_size", None) or args.train_batch_size
            self.asked_samples = batch * args.gradient_accumulation_steps
            # Under DataParallel the batch is split among the GPUs.
            run.batch_shares = max(1, args.n_gpu)
            run.ran.update(knobs_of_arguments(args), batch_size=batch // run.batch_shares)
            run.ran.update(_knobs_of_trainer(more["model"], more["train_dataloader"], run))
            live = getattr(more["optimizer"], "optimizer", more["optimizer"])
            own_class = module.Trainer.get_optimizer_cls_and_kwargs(args, more["model"])[0]
            if isinstance(live, Optimizer) and type(live) is not own_class:
                # The script gave the Trainer an optimizer of its own.
                run.ran["optimizer"] = type(live).__name__

        @never_raises
        def on_step_end(self, args: Any, state: Any, control: Any, **_more: Any) -> Any:
            if run.record_step(samples=run.samples_beside(self.asked_samples)):
                control.should_training_stop = True
            return control

        @never_raises
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_more: Any) -> None:
            if logs and "loss" in logs:
                run.add_loss(float(logs["loss"]))

        @never_raises
        def on_train_end(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
            run.end_training()

    module.DEFAULT_CALLBACKS.append(TrainerSteps)


def _knobs_of_trainer(model: Any, loader: Any, run: ScriptRun) -> dict[str, Any]:
    """Values of the knobs where the Trainer's objects contradict its arguments, or alone show them."""
    knobs, sampler = {}, loader
    for name in ("batch_sampler", "batch_sampler", "sampler"):  # accelerate's shares of a rank have two
        sampler = getattr(sampler, name, sampler)
    # A data set without a length is never grouped. Nothing shows whether a script packs its texts.
    if "LengthGrouped" in type(sampler).__name__:
        knobs["samples"] = "grouped"
    elif "train_sampling_strategy" in run.settings.trainer_fields:
        knobs["samples"] = "padded"
    modules = list(model.modules())
    is_checkpointed = any(getattr(module, "gradient_checkpointing", False) for module in modules)
    if is_checkpointed != (run.ran["checkpointing"] != "off"):
        knobs["checkpointing"] = "full" if is_checkpointed else "off"
    if not _catalog().has_liger_kernels(modules):
        # Liger only logs that it does not know the model.
        knobs |= {"kernels": "off", "loss": "full"}
    return knobs


def knobs_of_arguments(args: Any) -> dict[str, Any]:
    """Values of the knobs that TrainingArguments set; before its `__post_init__` a switch may be None."""
    catalog = _catalog()
    optimizer = getattr(args.optim, "value", args.optim)
    by_trainer_name = {entry.trainer_name: name for name, entry in catalog.OPTIMIZERS.items()}
    precisions = {"bf16": args.bf16, "fp16": args.fp16, "tf32": getattr(args, "tf32", None)}
    return {
        "grad_accum": args.gradient_accumulation_steps,
        "precision": next((name for name, is_on in precisions.items() if is_on), "fp32"),
        "workers": args.dataloader_num_workers,
        "pin_memory": "on" if args.dataloader_pin_memory else "off",
        "lr": args.learning_rate,
        "weight_decay": args.weight_decay,
        "grad_clip": args.max_grad_norm,
        "seed": args.seed,
        "prefetch": args.dataloader_prefetch_factor,
        "lr_schedule": getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type),
        "optimizer": by_trainer_name.get(TRAINER_SYNONYMS.get(optimizer, optimizer), optimizer),
        **catalog.levers_of_fields(functools.partial(getattr, args)),
    }


def _catalog() -> Any:
    """The worker's catalog: what each value of a knob is called by TrainingArguments."""
    return load_from_worker("catalog", "catalog", "__init__.py")


def callbacks_of_lightning() -> list[Any]:
    """The callback for package `lightning`; none outside a run."""
    return _callbacks("lightning.pytorch.callbacks") or []


def callbacks_of_pytorch_lightning() -> list[Any]:
    """The callback for package `pytorch_lightning`; none outside a run."""
    return _callbacks("pytorch_lightning.callbacks") or []


@never_raises
def _callbacks(module: str) -> list[Any] | None:
    """A list of the callback, empty outside a run; None after an error."""
    run = current_run()
    return [] if run is None else [_callback_class(importlib.import_module(module).Callback, run)()]


def _callback_class(base: Any, run: ScriptRun) -> Any:
    class LightningSteps(base):  # type: ignore[misc]
        _steps_before = _samples = 0
        # Lightning profiles the call of each hook, 4 us for an empty one. It skips a hook that cannot be called.
        on_train_batch_start = on_before_zero_grad = on_before_backward = None
        on_after_backward = on_before_optimizer_step = None

        @never_raises
        def on_train_start(self, trainer: Any, module: Any) -> None:
            run.count_steps_of(LIGHTNING)
            self._steps_before = trainer.global_step
            if math.isfinite(steps := trainer.estimated_stepping_batches):
                run.planned_steps = int(steps)
            precision = str(trainer.precision)
            run.ran.update(
                precision=PRECISION_BY_LIGHTNING_NAME.get(precision, precision),
                grad_accum=trainer.accumulate_grad_batches,
                grad_clip=trainer.gradient_clip_val or 0.0,
            )

        @never_raises
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self._samples += leading_size(batch) or 0
            # `global_step` counts optimizer steps; accumulation alone does not change it.
            if trainer.global_step == self._steps_before:
                return
            self._steps_before = trainer.global_step
            loss: Any = outputs.get("loss") if isinstance(outputs, dict) else outputs
            step_loss = None
            if loss is not None and loss.device.type == "cpu":
                # Lightning divides the loss by the batches that it accumulates.
                parts = trainer.accumulate_grad_batches if module.automatic_optimization else 1
                step_loss = float(loss.detach()) * parts
            elif loss is not None:
                run.unknown["loss"] = "reading it would stall the GPU"
            samples, self._samples = self._samples or None, 0
            if run.record_step(samples=samples, loss=step_loss):
                trainer.should_stop = True

        @never_raises
        def on_train_end(self, trainer: Any, module: Any) -> None:
            run.end_training()

    return LightningSteps


UPLOAD_METHODS = ("upload_file", "upload_folder", "create_commit", "preupload_lfs_files")
"""Upload methods of the Hub's `HfApi`. Its module also exports them as functions bound to one instance, so both
are replaced."""
SAVE_FUNCTIONS = {
    "torch": ("save",),
    "safetensors.torch": ("save_file", "save_model"),
    "transformers.modeling_utils": ("PreTrainedModel.save_pretrained", "PreTrainedModel.push_to_hub"),
    "transformers.tokenization_utils_base": (
        "PreTrainedTokenizerBase.save_pretrained",
        "PreTrainedTokenizerBase.push_to_hub",
    ),
    "transformers.trainer": ("Trainer.save_model", "Trainer._save_checkpoint", "Trainer.push_to_hub"),
    "accelerate.accelerator": ("Accelerator.save_state", "Accelerator.save_model", "Accelerator.save"),
    "torch.distributed.checkpoint.state_dict_saver": ("save", "async_save"),
    "lightning.pytorch.trainer.trainer": ("Trainer.save_checkpoint",),
    "pytorch_lightning.trainer.trainer": ("Trainer.save_checkpoint",),
    "deepspeed.runtime.engine": ("DeepSpeedEngine.save_checkpoint", "DeepSpeedEngine.save_16bit_model"),
    "huggingface_hub.hf_api": (*UPLOAD_METHODS, *(f"HfApi.{name}" for name in UPLOAD_METHODS)),
}
"""Functions that write checkpoints or upload them, by module; in a trial they do nothing."""


def _silence(names: tuple[str, ...], run: ScriptRun, module: Any) -> None:
    """Replace functions and methods of a module by ones that only note the call.

    The script's globals that name them are replaced too.
    """
    script = vars(sys.modules["__main__"])
    for name in names:
        owner_name, _, function_name = name.rpartition(".")
        owner = getattr(module, owner_name, None) if owner_name else module
        function = getattr(owner, function_name, None)
        if function is None:
            continue
        silent = _silenced(function, f"{module.__name__.partition('.')[0]}: {name}", run)
        setattr(owner, function_name, silent)
        script.update({name: silent for name, member in script.items() if member is function})


def _silenced(function: Any, label: str, run: ScriptRun) -> Any:
    @functools.wraps(function)
    def silent(*_args: Any, **_more: Any) -> None:
        run.suppressed[label] = None

    return silent
