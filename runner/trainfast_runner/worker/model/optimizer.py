"""The loss of each objective, from the logits or in the model's own forward, one definition for all strategies.

The `optimizer` knob is the class of its entry in the catalog over two groups of parameters; then the `precision` knob.
"""

import importlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from ..catalog import OPTIMIZERS, OptimizerEntry
from ..data.samples import IGNORED_LABEL, Batch
from ..levers.blocks import outermost_blocks
from ..spec import Knobs


def model_inputs(batch: Batch) -> Batch:
    """The model's inputs: everything in a batch but the labels, by the names of the model's forward."""
    return {name: values for name, values in batch.items() if name != "labels"}


def logits_of(outputs: Any) -> Tensor:
    """The logits in a model's outputs, which PP-LCNet calls `last_hidden_state`."""
    logits: Tensor = outputs.logits if hasattr(outputs, "logits") else outputs.last_hidden_state
    return logits


class Objective:
    """Cross entropy summed over the counted targets; the loop divides it by the targets of the global batch."""

    def __init__(self, name: str, knobs: Knobs) -> None:
        self.shifts = name == "causal-lm"
        self.in_forward = knobs.lever("loss") != "full"

    def targets(self, batch: Batch) -> Tensor:
        """The target of each logit: its label; for a causal model, the label of the next position."""
        labels = batch["labels"]
        return functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL) if self.shifts else labels

    def count_targets(self, batches: list[Batch]) -> Tensor:
        """Number of targets that count in all of `batches`, as an int64 scalar on their device."""
        counts = [(self.targets(batch) != IGNORED_LABEL).sum() for batch in batches]
        return torch.stack(counts).sum()

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Sum of the targets' cross entropies, in fp32 for every compute dtype."""
        if self.in_forward:
            loss: Tensor = model(**model_inputs(batch), targets=self.targets(batch))
            return loss
        return self.loss_of_logits(logits_of(model(**model_inputs(batch))), self.targets(batch))

    def loss_of_logits(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Sum of the cross entropies of `logits`, which have the targets' shape and a last dimension of classes.

        Computed on the logits' device, returned on the targets' device.
        """
        loss = functional.cross_entropy(
            logits.flatten(0, -2).float(),
            targets.flatten().to(logits.device),
            ignore_index=IGNORED_LABEL,
            reduction="sum",
        )
        return loss.to(targets.device)


def optimizer_class(entry: OptimizerEntry) -> Any:
    """The class of an entry, whose package the launch has found."""
    module, _, name = entry.path.partition(":")
    return getattr(importlib.import_module(module, __package__), name)


def build_optimizer(model: nn.Module, knobs: Knobs) -> Optimizer:
    """The optimizer over `model`'s trainable parameters."""
    entry = OPTIMIZERS[knobs.optimizer]
    groups = parameter_groups(model, knobs.weight_decay, matrices_apart=entry.splits_matrices)
    optimizer: Optimizer = optimizer_class(entry)(groups, lr=knobs.lr, **dict(entry.arguments))
    return optimizer


def load_optimizer(knobs: Knobs, device: torch.device, make_model: Callable[[], nn.Module]) -> None:
    """Import the optimizer's library; on a CPU step over one parameter of each shape of a model without memory.

    The compiler and its programs stay in memory, as oneDNN's for products in bf16 do, and are not the training's.
    """
    entry = OPTIMIZERS[knobs.optimizer]
    kind = optimizer_class(entry)
    if device.type != "cpu" or not (entry.compiles or entry.splits_matrices):
        return
    for group in parameter_groups(make_model(), knobs.weight_decay, matrices_apart=entry.splits_matrices):
        for shape, dtype in dict.fromkeys((parameter.shape, parameter.dtype) for parameter in group["params"]):
            parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
            parameter.grad = torch.zeros_like(parameter)
            kind([{**group, "params": [parameter]}], lr=knobs.lr).step()


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate of all groups, in place where a compiled step reads it from a tensor."""
    for group in optimizer.param_groups:
        group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate


def layer_matrices(model: nn.Module) -> set[int]:
    """Ids of the matrices in the layers of a model, or in all of a model without a list of layers."""
    modules = [module for block in outermost_blocks(model) or [model] for module in block.modules()]
    owned = (m.parameters(recurse=False) for m in modules if not isinstance(m, nn.Embedding))
    return {id(parameter) for parameters in owned for parameter in parameters if parameter.dim() == 2}


def parameter_groups(model: nn.Module, weight_decay: float, *, matrices_apart: bool = False) -> list[dict[str, Any]]:
    """Matrices and embeddings with weight decay; biases and norms without.

    With `matrices_apart` those of `layer_matrices` that decay are a group of their own, which has `matrices`.

    Norms and biases are vectors, except biases kept per expert or per pair of positions; those are recognized by name.
    Embeddings decay as they do in the Trainer; a table that is tied to the output projection is in one group, once.
    """
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    # ZeRO-3 keeps the shape of a partitioned parameter in `ds_shape`.
    decays = {name: len(getattr(p, "ds_shape", p.shape)) >= 2 and "bias" not in name for name, p in trainable}
    apart = layer_matrices(model) if matrices_apart else set()
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in trainable if decays[name] and id(p) not in apart], "weight_decay": weight_decay},
        {"params": [p for name, p in trainable if not decays[name]], "weight_decay": 0.0},
    ]
    matrices = [p for name, p in trainable if decays[name] and id(p) in apart]
    groups += [{"params": matrices, "weight_decay": weight_decay, "matrices": True}]
    return [group for group in groups if group["params"]]


def class_name(optimizer: Optimizer) -> str:
    """Name of the optimizer's class, as bitsandbytes names the class with 8-bit or paged states.

    torchao has classes of the same names, which get the package's name before theirs.
    The Trainer builds bitsandbytes' AdamW with `optim_bits=8` where the loop here builds AdamW8bit.
    """
    name = type(optimizer).__name__
    if type(optimizer).__module__ == "torchao.optim.adam":
        return f"torchao.{name}"
    if type(optimizer).__module__.startswith("bitsandbytes") and name == "AdamW":
        bits = getattr(getattr(optimizer, "args", None), "optim_bits", 32)
        return f"{'Paged' if getattr(optimizer, 'is_paged', False) else ''}AdamW{'8bit' if bits == 8 else ''}"
    return name


def implementation(optimizer: Optimizer) -> str | None:
    """Name of the loop of torch's AdamW that runs: loop, foreach or fused; None for other optimizers.

    With neither flag given torch decides by the parameters' device, in a function that is called here too.
    """
    if type(optimizer) is not torch.optim.AdamW:
        return None
    group = optimizer.param_groups[0]
    if group["fused"]:
        return "fused"
    if group["foreach"] is None:
        if not group["params"]:
            # ZeRO-3 shows the optimizer its parameters only while it steps.
            return None
        try:
            from torch.optim.optimizer import _default_to_fused_or_foreach
        except ImportError:
            return None
        _, foreach = _default_to_fused_or_foreach(group["params"], group["differentiable"], use_fused=False)
        return "foreach" if foreach else "loop"
    return "foreach" if group["foreach"] else "loop"


def rate_at(step: int, knobs: Knobs) -> float:
    """The learning rate of `step` (from 1): constant, or falling linearly to zero after the last step."""
    if knobs.lr_schedule == "linear":
        return knobs.lr * (knobs.steps - step + 1) / knobs.steps
    return knobs.lr


HALF_DTYPE = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
"""The half format of mixed precision: that of autocast, and of the weights that FSDP gathers.

With fp8 it is the format of everything that has no float8, and of what the float8 products return."""


class Precision:
    """One value of the `precision` knob, applied to the forward, the backward and the optimizer step."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.device = device
        self.autocast_dtype = HALF_DTYPE.get(name)
        self.scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None
        # Process-wide settings, so that fp32 and tf32 differ under any defaults of torch.
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = name == "tf32"

    def autocast(self) -> AbstractContextManager[Any]:
        """Context of a forward."""
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast_dtype)

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients, of the scaled loss under fp16."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the loss scale, before anything reads them."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """Update the weights; fp16 skips the update when a gradient overflowed, and lowers its scale."""
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()

    def initial_scale(self) -> float | None:
        """The loss scale before the first step; None without scaling."""
        return None if self.scaler is None else float(self.scaler.get_scale())

    def skipped_steps(self) -> int:
        """Number of updates skipped because a gradient overflowed, computed from the fall of the scale.

        Exact until the scale grows, which it does after 2000 steps without an overflow.
        """
        if self.scaler is None:
            return 0
        fallen = self.scaler._init_scale / self.scaler.get_scale()
        return max(0, round(math.log(fallen) / -math.log(self.scaler.get_backoff_factor())))

    def scale(self) -> Tensor | None:
        """The loss scale as a device tensor, so that copying it does not wait; None without scaling."""
        if self.scaler is None:
            return None
        scale: Tensor | None = self.scaler._scale
        return None if scale is None else scale.detach()


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")
