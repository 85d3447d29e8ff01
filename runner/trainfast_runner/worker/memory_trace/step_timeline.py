"""Trace a step without memory: the timelines of its live bytes at one batch size and of the optimizer's step."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import init_device_mesh
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten

from ..catalog import OPTIMIZERS
from ..data.samples import Batch, EncoderDecoderSplit, random_samples
from ..levers import lora
from ..levers.checkpointing import checkpoint
from ..loop import forward_backward
from ..model.build import attention_of, attention_reason, build_model
from ..model.model_config import check_seq_len, image_shape, resolve_config, tokens_per_sample, vocab_size
from ..model.optimizer import HALF_DTYPE, Objective, build_optimizer
from ..shared.words import FROZEN, GRADS, OPTIMIZER, PARAMS, QUANTIZED, TRACED_MICRO_BATCHES, split_tokens
from ..spec import Knobs, knobs_of
from ..strategies.base import Strategy, make_strategy
from ..strategies.pipeline import Cut, cut, divide
from ..strategies.tensor_parallel import add_exchanges, plan_for, sliced
from .compiled_saves import CompiledSaves
from .envelope import KEPT_BLOCKS, MAX_PERIOD, TRACED_BATCH_SIZES, StepWatch, TracedStack, shorten
from .live_bytes import LiveBytes, TracedSegment

PAGED_ELEMENTS = 100_000
"""bitsandbytes pages states from this many elements on."""
CUBLAS_HANDLES = 2
"""cuBLAS handles: one each for the forward's and the backward's thread."""
WORKSPACE_KIB, HOPPER_WORKSPACE_KIB = 2 * 4096 + 8 * 16, 32 * 1024
"""cuBLAS's workspace in KiB when CUBLAS_WORKSPACE_CONFIG (`:KIB:COUNT`) is unset."""


@dataclass
class TracedTraining:
    """The worker's own strategy and model, their tensors fake."""

    config: Any
    objective: str
    fake: FakeTensorMode
    strategy: Strategy


def trace_step(request: TraceRequest, size_index: int) -> dict[str, Any]:
    """Trace forward and backward at `TRACED_BATCH_SIZES[size_index]`.

    Returns `segments`, and the facts about the model for a prediction: `library_bytes` are memory of torch's allocator
    that libraries never free, `unused` the names of the parameters without a gradient. Raises InvalidInput for a model
    that cannot be built, any error for one that cannot be traced.
    """
    knobs = replace(request.knobs, grad_accum=TRACED_MICRO_BATCHES)
    config = resolve_config(request.model)
    check_seq_len(config, request.objective, knobs.seq_len)
    model = _model(request, config, knobs)
    stages = None
    if request.stages:
        if request.spread:
            tokens = tokens_per_sample(config, request.objective, knobs.seq_len)
            stages = spread_over(model, request.stages, tokens)
        else:
            # Divided by what the whole layers cost, as the worker does before it cuts their matrices.
            whole = _model(replace(request, tp_degree=None), config, knobs) if request.tp_degree else model
            stages = stages_of(replace(cut(whole, request.stages, knobs.seq_len), model=model), knobs.seq_len)
    sizes = [parameter.numel() for parameter in model.parameters()]
    with _traced_training(request, config, knobs, model) as traced_training:
        # A stage of a pipeline begins anywhere in a period.
        stacks = shorten(model, config, whole=request.whole, max_period=1 if request.stages else MAX_PERIOD)
        segments = _forward_backward(traced_training, stacks, TRACED_BATCH_SIZES[size_index])
        return {
            "parameter_sizes": sizes,
            "stacks": [
                {"kept": len(stack.blocks), "sizes": list(stack.sizes), "period": stack.period} for stack in stacks
            ],
            "segments": segments,
            "pipeline": stages,
            "library_bytes": library_bytes(request.device),
            "attention": _attention(model, knobs),
            "unused": _whole_model_names(
                stacks, [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
            ),
        }


def _attention(model: nn.Module, knobs: Knobs) -> str:
    """The attention kernel that was traced, with the reason if `attention` is auto."""
    kernel = attention_of(model) or ""
    reason = attention_reason(model, knobs)
    return f"{kernel}, because {reason}" if reason else kernel


def library_bytes(device_type: str) -> int:
    """Bytes of cuBLAS's workspaces, which torch allocates once for each handle and stream.

    The threads of forward and backward have a handle each (torch 2.11, aten/src/ATen/cuda/CublasHandlePool.cpp).
    """
    if device_type != "cuda":
        return 0
    workspaces = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    usual_kib = HOPPER_WORKSPACE_KIB if is_hopper else WORKSPACE_KIB
    return CUBLAS_HANDLES * 1024 * (sum(int(kib) * int(count) for kib, count in workspaces) or usual_kib)


def _whole_model_names(stacks: list[TracedStack], names: list[str]) -> list[str]:
    """Names in the whole model of parameters of the shortened model, given by `names`."""
    for stack in stacks:
        names = [whole for name in names for whole in stack.whole_model_names(name)]
    return names


def trace_optimizer(request: TraceRequest, size_index: int) -> dict[str, Any]:
    """Trace the optimizer's step with KEPT_BLOCKS + `size_index` blocks of each stack.

    `unused` parameters have no gradient. `segment` is the step, `left_out` the number of blocks of the model beyond
    KEPT_BLOCKS: 0 if the whole model is traced, and then `size_index` 1 has no `segment`. Raises InvalidInput for a
    model that cannot be built, any error for one that cannot be traced.
    """
    knobs = request.knobs
    config = resolve_config(request.model)
    model = _model(request, config, knobs)
    stacks = shorten(model, config, KEPT_BLOCKS + size_index, whole=request.whole)
    depths = {len(stack.sizes) for stack in stacks if stack.repeats > 1}
    left_out = max(depths, default=0) - KEPT_BLOCKS
    if len(depths) != 1 or left_out <= KEPT_BLOCKS:
        # Two traces of a few blocks take as long as one of all.
        if size_index > 0:
            return {"left_out": 0}
        model, stacks, left_out = _model(request, config, knobs), [], 0
    unused = set(request.unused or ())
    with _traced_training(request, config, knobs, model) as traced_training:
        updated = [
            parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and _whole_model_names(stacks, [name])[0] not in unused
        ]
        return {"segment": _optimizer_step(traced_training, updated), "left_out": left_out}


def _model(request: TraceRequest, config: Any, knobs: Knobs) -> nn.Module:
    """Build the model on the meta device, where values that decide about layers (dropout rates) are real."""
    model = build_model(config, request.objective, knobs, torch.device("meta"))
    if request.tp_degree:
        keep_one_slice(model, request)
    if request.half_weights:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(HALF_DTYPE[knobs.precision])
    return model


@contextmanager
def _traced_training(request: TraceRequest, config: Any, knobs: Knobs, model: nn.Module) -> Iterator[TracedTraining]:
    device = torch.device(request.device)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        _replace_with_empty(model, device)
        strategy = make_strategy(knobs, device)
        strategy.module = model
        yield TracedTraining(config, request.objective, fake, strategy)


def _replace_with_empty(model: nn.Module, device: torch.device) -> None:
    """Put tensors without memory in the place of parameters and buffers; tied ones stay tied.

    Call it inside a FakeTensorMode.
    """
    replacements: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in list(tensors.items()):
                if tensor is None:
                    continue
                if id(tensor) not in replacements:
                    empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    replacements[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                # Not the dictionary alone: an LSTM keeps a list of its weights as well.
                setattr(module, name, replacements[id(tensor)])
    for module in filter(lora.awaits_quantization, model.modules()):
        lora.quantize(module, fake=True)


def _count_weights(model: nn.Module, live_bytes: LiveBytes) -> None:
    """Count parameters, those that are trained and those that are not, and buffers."""
    live_bytes.count_all([*model.parameters(), *model.buffers()], PARAMS)
    live_bytes.count_all([parameter for parameter in model.parameters() if not parameter.requires_grad], FROZEN)
    live_bytes.count_all(lora.quantized_tensors(model), QUANTIZED)


def _forward_backward(
    traced_training: TracedTraining, stacks: list[TracedStack], batch_size: int
) -> list[TracedSegment]:
    """Trace forward and backward of the step's micro-batches, which the loop's own code takes."""
    model: Any = traced_training.strategy.module
    model.zero_grad(set_to_none=True)
    live_bytes = LiveBytes(traced_training.strategy.device.type)
    _count_weights(model, live_bytes)
    for number, stack in enumerate(stacks):
        if stack.repeats > 1:
            live_bytes.repeats |= {f"{number}:{index}": stack.repeats for index in range(1, 1 + stack.period)}
    knobs = traced_training.strategy.knobs
    if knobs.compile != "off":
        live_bytes.saves = CompiledSaves(live_bytes)
    watch = StepWatch(live_bytes)
    hooks = watch.follow(stacks)
    if knobs.checkpointing != "off":
        checkpoint(model, knobs, watch.around_checkpoints)
    hooks += [
        parameter.register_post_accumulate_grad_hook(lambda owner: live_bytes.set_category(owner.grad, GRADS))
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    batches = islice(_batches(traced_training, batch_size, live_bytes), knobs.grad_accum)
    try:
        with live_bytes, live_bytes.saves or nullcontext():
            watch.enter("other")
            forward_backward(
                traced_training.strategy, Objective(traced_training.objective, knobs), batches, watch.enter
            )
            live_bytes.end()
    finally:
        for hook in hooks:
            hook.remove()
    return live_bytes.segments


def _batches(traced_training: TracedTraining, batch_size: int, live_bytes: LiveBytes) -> Iterator[Batch]:
    """Batches with the shapes and dtypes of the data; live bytes do not depend on their values."""
    while True:
        batch: Batch = {
            name: traced_training.fake.from_tensor(tensor)
            for name, tensor in _one_batch(traced_training, batch_size).items()
        }
        for values in batch.values():
            live_bytes.count(values, live_bytes.category)
        yield batch


def _one_batch(traced_training: TracedTraining, batch_size: int) -> Batch:
    config, seq_len = traced_training.config, traced_training.strategy.knobs.seq_len
    if traced_training.objective == "image-classification":
        channels, size = image_shape(config)
        return {
            "pixel_values": torch.zeros(batch_size, channels, size, size),
            "labels": torch.zeros(batch_size, dtype=torch.int64),
        }
    split = EncoderDecoderSplit(split_tokens(seq_len)[0], 0) if traced_training.objective == "seq2seq" else None
    samples = random_samples(vocab_size(config), traced_training.objective, seq_len, 0, split, batch_size)
    return samples.__getitems__(list(range(batch_size)))


def _optimizer_step(traced_training: TracedTraining, updated: list[nn.Parameter]) -> TracedSegment:
    """Trace the optimizer's second step, which finds its states."""
    strategy = traced_training.strategy
    is_cuda = strategy.device.type == "cuda"
    with unset_fake_temporarily():
        # bitsandbytes computes its quantization map, which is data.
        optimizer = strategy.optimizer = optimizer_on_device(strategy.module, strategy.knobs)
        if is_cuda:
            keep_pages_aside(optimizer)
    live_bytes = LiveBytes(strategy.device.type)
    _count_weights(strategy.module, live_bytes)
    watch = StepWatch(live_bytes)
    choose_foreach(optimizer, strategy.device.type)
    with live_bytes, counted_compiled_steps(live_bytes):
        watch.enter("other")
        if strategy.precision.scaler is not None:
            strategy.precision.scaler.scale(torch.zeros((), device=strategy.device))
        for _ in range(2):
            for parameter in updated:
                parameter.grad = torch.empty_like(parameter)
                live_bytes.set_category(parameter.grad, GRADS)
            states = tree_flatten(list(optimizer.state.values()))[0]
            parts = [part for state in states for part in plain_tensors(state)]
            live_bytes.count_all([part for part in parts if isinstance(part, Tensor)], OPTIMIZER)
            watch.enter("optimizer")
            strategy.optimizer_step()
        live_bytes.end()
    return live_bytes.segments[-1]


SMALLEST_OFFLOADED = 4096
"""Elements of the smallest parameter that torchao updates on the host (torchao/optim/cpu_offload.py)."""


def optimizer_on_device(model: nn.Module, knobs: Knobs) -> Any:
    """Build the optimizer; of one that offloads only the part that stays on the GPU, which is fused."""
    if OPTIMIZERS[knobs.optimizer].early_reason is None:
        return build_optimizer(model, knobs)
    kept = nn.ParameterList(p for p in model.parameters() if p.numel() < SMALLEST_OFFLOADED)
    return build_optimizer(kept, replace(knobs, optimizer="adamw-fused"))


def plain_tensors(state: Any) -> list[Any]:
    """The tensors that a state is made of: itself, or the codes, scales and map of a quantized one."""
    if not is_traceable_wrapper_subclass(state):
        return [state]
    return [getattr(state, name) for name in state.__tensor_flatten__()[0]]


@contextmanager
def counted_compiled_steps(live_bytes: LiveBytes) -> Iterator[None]:
    """Count torchao's compiled step of a parameter, which cannot be compiled for fake tensors."""
    real, torch.compile = torch.compile, lambda *_, **__: live_bytes.count_compiled_step  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = real


def choose_foreach(optimizer: Any, device_type: str) -> None:
    """Choose foreach as torch does for tensors on a GPU; for fake tensors torch does not."""
    for group in optimizer.param_groups:
        if device_type == "cuda" and group.get("foreach", 0) is None and not group.get("fused"):
            group["foreach"] = True


def keep_pages_aside(optimizer: Any) -> None:
    """Keep bitsandbytes' paged states on the host, from the size at which it pages them.

    They are CUDA's managed memory, which torch's allocator does not count, and cannot be fake (bitsandbytes,
    optim/optimizer.py, get_state_buffer).
    """
    if not getattr(optimizer, "is_paged", False):
        return
    optimizer.is_paged = False

    def buffer(parameter: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        paged = parameter.numel() >= PAGED_ELEMENTS
        state = torch.zeros_like(parameter, dtype=dtype, device="cpu" if paged else parameter.device)
        state.is_paged = paged  # type: ignore[attr-defined]
        return state

    optimizer.get_state_buffer = buffer


def stages_of(division: Cut, seq_len: int) -> dict[str, Any]:
    """Return the stages of a pipeline, and the elements that a sample passes between and after them.

    `hidden` are the elements between stages, `output` those at the end. `begin` and `end` are a stage's blocks,
    `elements` its parameters and `largest` its largest one; `tied` are those that both the first and the last stage
    have.
    """
    tied = sum(parameter.numel() for parameter in division.tied())
    stages = _stages(
        division.bounds, [list(division.stage(index).parameters()) for index in range(division.stage_count)]
    )
    return {"stages": stages, "tied": tied, **_passing(division.model, seq_len)}


def spread_over(model: nn.Module, count: int, seq_len: int) -> dict[str, Any]:
    """Return the fields of `stages_of` for layers spread over `count` GPUs of one process, and `head`.

    `head` is the stage that computes the logits. A tied head is computed where the embedding is (`_move_own`).
    """
    layers = divide(model, count)
    before, after = (
        [p for module in modules for p in module.parameters(recurse=False)] for modules in (layers.before, layers.after)
    )
    first_ids = {id(parameter) for parameter in before}
    groups = []
    for index in range(count):
        blocks = layers.blocks[layers.bounds[index] : layers.bounds[index + 1]]
        groups.append([parameter for block in blocks for parameter in block.parameters()])
    groups[0] += before
    groups[-1] += [parameter for parameter in after if id(parameter) not in first_ids]
    hf_model: Any = model
    output = hf_model.get_output_embeddings()
    head = 0 if output is not None and id(output.weight) in first_ids else count - 1
    return {"stages": _stages(layers.bounds, groups), "tied": 0, "head": head, **_passing(model, seq_len)}


def _stages(bounds: tuple[int, ...], groups: list[list[nn.Parameter]]) -> list[dict[str, int]]:
    """The stages by their blocks, of which s has `bounds[s]` up to `bounds[s + 1]`, and their parameters."""
    stages = []
    for begin, end, parameters in zip(bounds, bounds[1:], groups, strict=False):
        sizes = {id(parameter): parameter.numel() for parameter in parameters}.values()
        stages.append({"begin": begin, "end": end, "elements": sum(sizes), "largest": max(sizes)})
    return stages


def _passing(model: nn.Module, seq_len: int) -> dict[str, int]:
    config: Any = model.config
    classifies = type(model).__name__.endswith(("ForSequenceClassification", "ForImageClassification"))
    output = config.num_labels if classifies else seq_len * config.vocab_size
    return {"hidden": seq_len * config.hidden_size, "output": output}


def keep_one_slice(model: nn.Module, request: TraceRequest) -> None:
    """Cut `model`, which has no memory yet, into the request's `tp_degree` slices and keep the first, in place.

    The exchanges go through torch's fake process group, which has no other processes. Parameters are plain tensors
    here and DTensors at rest in the strategy: both have the same bytes.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    degree = request.tp_degree or 1
    if dist.is_initialized():
        # The group of another model that this process has traced, perhaps in other slices.
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=degree, store=FakeStore())
    mesh = init_device_mesh(request.device, (degree,), mesh_dim_names=("tp",))
    plan = plan_for(model, degree, sequence_parallel=request.sequence_parallel, expert_parallel=request.expert_parallel)
    add_exchanges(model, plan, mesh)
    for name in plan.dispatches:
        experts: Any = model.get_submodule(name)
        experts.forward = partial(_routed_evenly, experts.forward, degree)
    slices: dict[int, nn.Parameter] = {}
    for name, module in model.named_modules():
        for key, whole in module._parameters.items():
            if whole is None:
                continue
            if id(whole) not in slices:
                part = sliced(whole.detach(), plan.slices.get(f"{name}.{key}"), 0, degree)
                slices[id(whole)] = nn.Parameter(part, whole.requires_grad)
            module._parameters[key] = slices[id(whole)]


def _routed_evenly(forward: Any, degree: int, states: Tensor, experts: Tensor, weights: Tensor) -> Any:
    """Call the experts' forward as if every rank sent equally many tokens to each: fake tensors have no counts."""
    rows = experts.numel() // degree
    counts = [rows // degree + (index < rows % degree) for index in range(degree)]
    with _Items(cycle(counts)):
        return forward(states, experts, weights)


class _Items(TorchFunctionMode):
    """Gives these numbers, one after the other, to code that reads numbers from tensors."""

    def __init__(self, numbers: Iterator[int]) -> None:
        super().__init__()
        self.numbers = numbers

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return next(self.numbers) if function is Tensor.item else function(*args, **(kwargs or {}))


@dataclass(frozen=True)
class TraceRequest:
    """A request for one part of a training step, and everything that its trace depends on."""

    part: str
    """`step`: forward and backward at two batch sizes. `optimizer`: the optimizer's step."""
    model: dict[str, Any]
    """`model` of the preset."""
    objective: str
    device: str
    """`cpu` or `cuda`."""
    knobs: Knobs
    whole: bool = False
    """True to trace every block, not three of a stack of identical ones."""
    tp_degree: int | None = None
    """Number of ranks that share the layers under tp; the slice of one is traced. None for a whole model."""
    sequence_parallel: bool = False
    """True if these ranks also share the sequence between the layers' matrices."""
    expert_parallel: bool = False
    """True if these ranks have whole experts, not parts of each."""
    half_weights: bool = False
    """True for the weights that FSDP gathers in mixed precision: half ones, under autocast."""
    stages: int | None = None
    """Stages of a pipeline; None without one."""
    spread: bool = False
    """True to divide the model over `stages` devices as naive-mp does, not into stages."""
    unused: tuple[str, ...] | None = None
    """Parameters without a gradient, for the part `optimizer`; None until the request `after` names them."""
    after: int | None = None
    """Index of the `step` request whose answer names the `unused` parameters; None if this request names them."""


def read_request(fields: dict[str, Any]) -> TraceRequest:
    """Return the request with these fields of its JSON."""
    unused = fields.get("unused")
    typed = {"knobs": knobs_of(fields["knobs"]), "unused": None if unused is None else tuple(unused)}
    return TraceRequest(**{**fields, **typed})
