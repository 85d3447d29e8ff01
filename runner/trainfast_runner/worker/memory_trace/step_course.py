"""A step without memory: the course of its live bytes at one batch size, and those of the optimizer's step."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.optim import Optimizer

from ..build import CHECKPOINT, attention_of, attention_reason, build_model
from ..data.samples import Batch, Halves, random_samples
from ..loop import Rig
from ..model_config import (
    check_seq_len,
    image_shape,
    resolve_config,
    split_tokens,
    tokens_per_sample,
    vocab_size,
)
from ..objective import Objective
from ..optimizer import build_optimizer
from ..precision import Precision
from ..spec import Knobs
from ..strategies import Strategy, make_strategy
from .ledger import GRADS, OPTIMIZER, PARAMS, Ledger, Stretch
from .repeated_blocks import KEPT, Stack, shorten
from .step_watch import StepWatch

BATCHES = (2, 4)
"""The batch sizes that are traced. Not 1: with one sample some copies are views."""
MICRO_BATCHES = 2
"""In the second gradients are alive from the start: it stands for all but the first."""

PAGED_ELEMENTS = 100_000
HANDLES = 2
WORKSPACE_KIB, HOPPER_WORKSPACE_KIB = 2 * 4096 + 8 * 16, 32 * 1024
"""Where CUBLAS_WORKSPACE_CONFIG, whose form is :KIB:COUNT, says nothing."""


@dataclass
class Subject:
    """What is traced: the worker's own parts, their tensors fake."""

    config: Any
    objective: str
    knobs: Knobs
    device: torch.device
    fake: FakeTensorMode
    module: nn.Module
    strategy: Strategy
    precision: Precision

    def rig(self, batches: Iterator[Batch], watch: StepWatch, optimizer: Optimizer | None = None) -> Rig:
        """What the worker's step takes; of the parts that a trace has no use for there are none."""
        nothing: Any = None
        return Rig(
            knobs=self.knobs,
            device=self.device,
            module=self.module,
            optimizer=nothing if optimizer is None else optimizer,
            objective=Objective(self.objective),
            precision=self.precision,
            strategy=self.strategy,
            batches=batches,
            clock=watch,
            memory=nothing,
            log=nothing,
            journal=_Silent(),  # type: ignore[arg-type]
            after_first_step=nothing,
        )


class _Silent:
    """In place of the journal: takes the phase and tells nobody."""

    phase = ""


def course_at(request: dict[str, Any], size: int) -> dict[str, Any]:
    """Forward and backward at `BATCHES[size]`: `stretches`, and what of the model they are read by. `library_bytes` are
    what libraries take of torch's allocator besides, for good.

    `unused` names the parameters that got no gradient. Raises InvalidInput for what cannot be built, anything for what
    cannot be traced.
    """
    knobs = replace(Knobs(**request["knobs"]), grad_accum=MICRO_BATCHES)
    config = resolve_config(request["model"])
    check_seq_len(config, request["objective"], knobs.seq_len)
    model = _model(request, config, knobs)
    stages = None
    if request.get("stages"):
        # Only here: what cutting a model takes is another second of imports.
        from .stages import spread_over, stages_of

        if request.get("spread"):
            tokens = tokens_per_sample(config, request["objective"], knobs.seq_len)
            stages = spread_over(model, request["stages"], tokens)
        else:
            stages = stages_of(model, request["stages"], knobs.seq_len)
    sizes = [parameter.numel() for parameter in model.parameters()]
    with _traced(request, config, knobs, model) as subject:
        stacks = shorten(model, config, bool(request.get("whole")))
        stretches = _micro_steps(subject, stacks, BATCHES[size])
        return {
            "parameter_sizes": sizes,
            "stacks": [{"kept": len(stack.blocks), "sizes": list(stack.sizes)} for stack in stacks],
            "stretches": stretches,
            "pipeline": stages,
            "library_bytes": library_bytes(subject.device.type),
            "attention": _attention(model, knobs),
            "unused": _names(stacks, [name for name, held in model.named_parameters() if held.grad is None]),
        }


def _attention(model: nn.Module, knobs: Knobs) -> str:
    """The kernel that was traced, and why it was taken where `attention` left that open."""
    kernel, reason = attention_of(model) or "", attention_reason(model, knobs)
    return f"{kernel}, because {reason}" if reason else kernel


def library_bytes(device_type: str) -> int:
    """cuBLAS's workspaces: torch allocates one for each handle and stream, and the thread of the forward and that of
    the backward have a handle each (torch 2.11, aten/src/ATen/cuda/CublasHandlePool.cpp)."""
    if device_type != "cuda":
        return 0
    asked = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    usual_kib = HOPPER_WORKSPACE_KIB if is_hopper else WORKSPACE_KIB
    return HANDLES * 1024 * (sum(int(kib) * int(count) for kib, count in asked) or usual_kib)


def _names(stacks: list[Stack], names: list[str]) -> list[str]:
    """The names in the whole model of parameters of the shortened one."""
    for stack in stacks:
        names = [whole for name in names for whole in stack.stood_for(name)]
    return names


def update_at(request: dict[str, Any], size: int) -> dict[str, Any]:
    """The optimizer's step with `size` blocks more than KEPT of each stack; gradients for all but `unused` parameters.

    `stretch` is the step, `more` how many blocks the model has beyond KEPT. Where the whole model is traced that is 0,
    and there is no `stretch` for `size` 1. Raises as `course_at`.
    """
    knobs = Knobs(**request["knobs"])
    config = resolve_config(request["model"])
    model = _model(request, config, knobs)
    stacks = shorten(model, config, bool(request.get("whole")), KEPT + size)
    depths = {len(stack.sizes) for stack in stacks if stack.repeats > 1}
    more = max(depths, default=0) - KEPT
    if len(depths) != 1 or more <= KEPT:
        # Two traces of a few blocks are no less than one of all.
        if size > 0:
            return {"more": 0}
        model, stacks, more = _model(request, config, knobs), [], 0
    unused = set(request["unused"])
    with _traced(request, config, knobs, model) as subject:
        updated = [
            held
            for name, held in model.named_parameters()
            if held.requires_grad and _names(stacks, [name])[0] not in unused
        ]
        return {"stretch": _optimizer_step(subject, updated), "more": more}


def _model(request: dict[str, Any], config: Any, knobs: Knobs) -> nn.Module:
    """On the meta device, where the values that decide about layers (rates of dropping) are real."""
    model = build_model(config, request["objective"], knobs, torch.device("meta"))
    if request.get("tp_degree"):
        from .slices import keep_one_slice

        keep_one_slice(model, request["tp_degree"], request["device"])
    return model


@contextmanager
def _traced(request: dict[str, Any], config: Any, knobs: Knobs, model: nn.Module) -> Iterator[Subject]:
    device = torch.device(request["device"])
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        _place(model, device)
        strategy = make_strategy(knobs, device)
        yield Subject(config, request["objective"], knobs, device, fake, model, strategy, strategy.make_precision())


def _place(model: nn.Module, device: torch.device) -> None:
    """Put parameters and buffers of the meta device on `device`, in place, what is tied still tied."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                held[name] = made[id(tensor)]  # type: ignore[assignment]


def _micro_steps(subject: Subject, stacks: list[Stack], batch_size: int) -> list[Stretch]:
    """Forward and backward of the step's micro-batches, by the worker's own code."""
    subject.module.zero_grad(set_to_none=True)
    ledger = Ledger(subject.device.type)
    ledger.count_all([*subject.module.parameters(), *subject.module.buffers()], PARAMS)
    for number, stack in enumerate(stacks):
        if stack.repeats > 1:
            ledger.repeats[f"{number}:1"] = stack.repeats
    watch = StepWatch(ledger)
    hooks = watch.follow(stacks)
    if subject.knobs.checkpointing == "full":
        transformer: Any = subject.module
        transformer.gradient_checkpointing_enable({**CHECKPOINT, "context_fn": watch.around_checkpoints})
    for parameter in subject.module.parameters():
        hooks.append(parameter.register_post_accumulate_grad_hook(_keep(ledger)))  # type: ignore[no-untyped-call]
    try:
        with ledger:
            watch.enter("other")
            subject.strategy.accumulate(subject.rig(_batches(subject, batch_size, ledger), watch))
            ledger.end()
    finally:
        for hook in hooks:
            hook.remove()
    return ledger.stretches


def _keep(ledger: Ledger) -> Any:
    def gradient_is_there(parameter: Tensor) -> None:
        assert parameter.grad is not None
        ledger.change(parameter.grad, GRADS)

    return gradient_is_there


def _batches(subject: Subject, batch_size: int, ledger: Ledger) -> Iterator[Batch]:
    """Batches of the shapes and dtypes that the data have; their values have no say in what is alive."""
    while True:
        batch: Batch = {name: subject.fake.from_tensor(real) for name, real in _samples(subject, batch_size).items()}
        for values in batch.values():
            ledger.count(values, ledger.category)
        yield batch


def _samples(subject: Subject, batch_size: int) -> Batch:
    config, seq_len = subject.config, subject.knobs.seq_len
    if subject.objective == "image-classification":
        channels, size = image_shape(config)
        return {
            "pixel_values": torch.zeros(batch_size, channels, size, size),
            "labels": torch.zeros(batch_size, dtype=torch.int64),
        }
    halves = Halves(split_tokens(seq_len)[0], 0) if subject.objective == "seq2seq" else None
    samples = random_samples(vocab_size(config), subject.objective, seq_len, 0, halves, batch_size)
    return samples.__getitems__(list(range(batch_size)))


def _optimizer_step(subject: Subject, updated: list[nn.Parameter]) -> Stretch:
    """The optimizer's second step, when its states are there."""
    with unset_fake_temporarily():
        # bitsandbytes computes its quantization map, which is data.
        optimizer = build_optimizer(subject.module, subject.knobs)
        if subject.device.type == "cuda":
            keep_pages_aside(optimizer)
    ledger = Ledger(subject.device.type)
    ledger.count_all([*subject.module.parameters(), *subject.module.buffers()], PARAMS)
    watch = StepWatch(ledger)
    rig = subject.rig(iter(()), watch, optimizer)
    for group in optimizer.param_groups:
        if subject.device.type == "cuda" and group.get("foreach", 0) is None and not group.get("fused"):
            # As torch decides for tensors on a GPU; fake ones it does not take for such.
            group["foreach"] = True
    with ledger:
        watch.enter("other")
        if subject.precision.scaler is not None:
            subject.precision.scaler.scale(torch.zeros((), device=subject.device))
        for _ in range(2):
            for parameter in updated:
                parameter.grad = torch.empty_like(parameter)
                ledger.change(parameter.grad, GRADS)
            ledger.count_all(_tensors(optimizer.state.values()), OPTIMIZER)
            watch.enter("optimizer")
            subject.strategy.update(rig)
        ledger.end()
    return ledger.stretches[-1]


def keep_pages_aside(optimizer: Any) -> None:
    """Have bitsandbytes' paged states on the host, from the size on from which it pages them (optim/optimizer.py,
    get_state_buffer): they are CUDA's managed memory, of which torch's allocator knows nothing, and cannot be fake."""
    if not getattr(optimizer, "is_paged", False):
        return
    optimizer.is_paged = False

    def buffer(parameter: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        paged = parameter.numel() >= PAGED_ELEMENTS
        state: Any = torch.zeros_like(parameter, dtype=dtype, device="cpu" if paged else parameter.device)
        state.is_paged = paged
        made: Tensor = state
        return made

    optimizer.get_state_buffer = buffer


def _tensors(values: Any) -> Iterator[Tensor]:
    """Every tensor in nested dictionaries and lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value.values())
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
