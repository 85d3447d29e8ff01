"""The two traces that make a memory model, each cached by everything it depends on.

Forward and backward do not change with the optimizer, nor the optimizer's step with the sequence, the attention or the
checkpointing: turning one knob traces one part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from trainfast_runner.machine import training_python
from trainfast_runner.memory.pipeline import PipelineCut, stage_count
from trainfast_runner.memory.timeline import BlockStack, Segment, Work
from trainfast_runner.records.home import cache_directory
from trainfast_runner.settings.knobs import defaults
from trainfast_runner.settings.precisions import MIXED_PRECISIONS
from trainfast_runner.settings.spec import RunSpec
from trainfast_runner.settings.strategy_of_run import strategy_of
from trainfast_runner.worker.shared.traced import NO_WORK

STEP_KNOBS = ("precision", "seq_len", "checkpointing", "attention")
"""The knobs that decide the live bytes of forward and backward. The optimizer decides the live bytes of its own
step; all other knobs only change the number of repetitions and of ranks."""
TRACE_FORMAT = "7"
"""Format of the cached traces; a trace of another format is made again."""


class StepTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Forward and backward of a model, and its division into blocks and stages."""

    parameter_sizes: list[int]
    stacks: list[BlockStack]
    segments: list[Segment]
    pipeline: PipelineCut | None
    unused: list[str]
    """The parameters that get no gradient, and so no optimizer state."""
    library_bytes: int = 0
    """Bytes of a GPU's libraries in torch's allocator."""
    attention: str = ""
    """The model's attention kernel, and the reason that `attention=auto` took it."""


class OptimizerTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Live bytes by category of the whole model before the optimizer's second step and at that step's peak."""

    before_optimizer: list[float]
    optimizer_peak: list[float]
    work: Work = NO_WORK
    """Calls, FLOPs and bytes moved by the optimizer's step."""


Trace = StepTrace | OptimizerTrace


@dataclass(frozen=True)
class TraceRequest:
    """A request to the tracer, and the cache file of its answer."""

    fields: Mapping[str, Any]
    file: Path


@dataclass(frozen=True)
class ModelRequests:
    """The requests for both traces of one model."""

    step: TraceRequest
    optimizer: TraceRequest

    @property
    def name(self) -> str:
        """The name of the model, by which its corrections are kept."""
        return f"{self.step.file.stem}-{self.optimizer.file.stem}"


def requests_for(
    spec: RunSpec, device: str, executable: str, *, whole: bool = False, installed: list[str] | None = None
) -> ModelRequests:
    """Return the requests for a run's model on `device`, cpu or cuda; `whole` traces every block.

    `installed` is `training_python.install_stamps(executable)` if the caller has it already.
    """
    step, optimizer = request_fields(spec, device, whole=whole)
    return ModelRequests(_trace_request(step, executable, installed), _trace_request(optimizer, executable, installed))


def request_fields(spec: RunSpec, device: str, *, whole: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tracer's requests for the step and for the optimizer: everything that each trace depends on."""
    strategy = strategy_of(spec.knobs)
    precision = str(spec.knobs["precision"])
    if precision == "tf32":
        # Other kernels, the same tensors.
        precision = "fp32"
    if strategy.is_zero and precision in MIXED_PRECISIONS:
        # DeepSpeed trains a model whose weights are half; it does not cast them as autocast does.
        precision = "bf16-pure"
    shared_fields: dict[str, Any] = {"model": spec.model, "objective": spec.data["objective"], "device": device}
    if whole:
        shared_fields["whole"] = True
    # A rank of tensor parallelism has a part of the model, of other shapes.
    if strategy.is_tensor_parallel:
        shared_fields["tp_degree"] = spec.knobs["tp_degree"]
    step = {**shared_fields, "part": "step", "knobs": {name: spec.knobs[name] for name in STEP_KNOBS}}
    step["knobs"]["precision"] = precision
    if strategy.memory_rule == "FullySharded" and precision in MIXED_PRECISIONS:
        step["half_weights"] = True
    # The trace is the whole model's; the number of stages says where the worker cuts it.
    if strategy.is_pipeline:
        step["stages"] = stage_count(spec.knobs)
    elif "mp" in strategy.axes and spec.knobs["devices"] is not None:
        step |= {"stages": stage_count(spec.knobs), "spread": True}
    knobs = {
        "optimizer": spec.knobs["optimizer"],
        # Under autocast the weights, and so their states, are fp32; fp16 also scales the loss.
        "precision": "fp32" if precision == "bf16" else precision,
        # Every model has eager attention, which has no parameters.
        "attention": "eager",
        # Without decay SGD has no copy of its gradients: how much decay changes nothing.
        "weight_decay": float(bool(spec.knobs["weight_decay"])),
    }
    return step, {**shared_fields, "part": "optimizer", "knobs": knobs}


def _trace_request(fields: dict[str, Any], executable: str, installed: list[str] | None) -> TraceRequest:
    name = training_python.request_hash(executable, json.dumps(fields, sort_keys=True), TRACE_FORMAT, installed)
    # The worker wants a value for each knob; those that the trace does not depend on have their defaults.
    request = {**fields, "knobs": {**defaults(), **fields["knobs"]}}
    return TraceRequest(request, cache_directory() / "traced" / f"{name}.json")
