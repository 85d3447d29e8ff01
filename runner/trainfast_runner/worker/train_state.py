"""Everything that the training steps of one setting use, and the `actual` record, read from those live objects."""

import copy
import importlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._dynamo import OptimizedModule

from .catalog import OPTIMIZERS, STRATEGIES, WHOLE
from .data.batches import Samples, batches_of, is_padded, mean_tokens
from .data.samples import Batch, CountedBatches
from .engines.base import make_engine
from .levers import actual_fields as lever_fields
from .levers import float8, head_loss
from .levers.blocks import compiled_blocks
from .levers.checkpointing import recomputed_share
from .memory.allocator import use_ordinary_thresholds
from .memory.memory_meter import MemoryMeter
from .model.build import CompileWatch, attention_of, attention_reason, build_model, check_adapters, check_header, unwrap
from .model.flops import SampleFlops, flops_per_sample
from .model.model_config import text_part
from .model.optimizer import Objective, class_name, dtype_name, implementation, load_optimizer, logits_of
from .records.record_file import WorkerLog
from .records.step_log import StepRecorder, make_clock
from .spec import RankSpec
from .strategies.base import make_strategy

NULL_UNLESS_READ = dict.fromkeys(("reduce_dtype", "zero_stage", "mesh", "pipeline_stages"))
"""Fields of the record that only some strategies read from their live objects."""


class ComputeDtype:
    """Reads the dtype of a forward's first matrix product with a hook, and removes the hook; of four bits their own.

    A hook inside a compiled module would be compiled into it: there the dtype is the logits', and unknown where the
    model returns its loss.
    """

    def __init__(self, model: nn.Module, compiled: bool) -> None:
        self.name: str | None = None
        layer = model if compiled else next((m for m in model.modules() if _is_matrix_product(m)), None)
        self._hook = None if layer is None else layer.register_forward_hook(self._see)

    def _see(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        tensor = output if isinstance(output, torch.Tensor) else logits_of(output)
        # bitsandbytes casts the product of a layer of four bits back to its input's dtype.
        dtype = getattr(module, "compute_dtype", tensor.dtype)
        self.name = dtype_name(dtype) if tensor.dim() else None
        if self._hook is not None:
            self._hook.remove()


def _is_matrix_product(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    is_leaf = next(module.children(), None) is None
    if not is_leaf or not isinstance(weight, torch.Tensor) or isinstance(module, nn.Embedding):
        return False
    # ZeRO-3 keeps the shape of a partitioned parameter in `ds_shape`.
    return len(getattr(weight, "ds_shape", weight.shape)) == 2


def whole_size(parameter: torch.Tensor) -> int:
    """Elements of the whole parameter, also if this rank has a slice of it or DeepSpeed's empty placeholder."""
    return int(getattr(parameter, "ds_numel", getattr(parameter, "whole_numel", parameter.numel())))


class TrainState:
    """Strategy and engine that the knobs of `spec` name; the loader from `load` on, the model from `build` on."""

    model: torch.nn.Module
    tokens_per_sample: int
    """Tokens of a sample without padding: the mean if lengths vary."""
    _flops: SampleFlops | None
    _is_compiled: bool
    _compute_dtype: ComputeDtype

    def __init__(self, spec: RankSpec, config: Any, device: torch.device) -> None:
        """Make strategy and engine. Raises InvalidInput for knobs that either cannot obey."""
        check_adapters(config, spec.data.objective, spec.knobs)
        self._optimizer = OPTIMIZERS[spec.knobs.optimizer]
        self.strategy = make_strategy(spec.knobs, device)
        # One process loads for all of its devices.
        self.knobs = replace(spec.knobs, batch_size=spec.knobs.batch_size * self.strategy.batch_shares)
        self.engine = make_engine(self.knobs, self.strategy, Objective(spec.data.objective, self.knobs))
        self.batches: Iterator[Batch] = iter(())
        self._spec = replace(spec, knobs=self.knobs)
        self._config = config

    def start(self) -> None:
        """Join the other ranks, and load what compiler and optimizer keep in memory: none is counted yet."""
        self.strategy.start()
        if self.knobs.compile != "off":
            importlib.import_module("torch._inductor.compile_fx")
        config, objective = copy.deepcopy(self._config), self._spec.data.objective
        if self._optimizer.compiles:
            check_header("optimizer", self._optimizer.name, self._optimizer.fallback)
            self.strategy.enter_phase("compile", f"the step of {self._optimizer.name}, once for each shape")
        # The shapes of slices are known only once the strategy has cut them.
        is_whole = STRATEGIES[self.knobs.strategy].parameter_form == WHOLE
        meta = torch.device("meta")
        load_optimizer(
            self.knobs,
            self.strategy.device,
            lambda: build_model(config, objective, self.knobs, meta) if is_whole else nn.Linear(64, 64, device=meta),
        )

    def load(self, samples: Samples, steps: int) -> None:
        """Start the loader for `steps` steps; no memory of its processes is measured."""
        knobs, strategy = replace(self.knobs, steps=steps), self.strategy
        worker_init_fn = use_ordinary_thresholds if strategy.device.type == "cpu" else None
        self.batches = batches_of(samples, knobs, strategy.dp_rank, strategy.dp_degree, worker_init_fn)
        if is_padded(samples):
            self.batches = CountedBatches(self.batches)

    def build(self, samples: Samples) -> None:
        """Build the model, and wrap it with its optimizer."""
        objective = self._spec.data.objective
        # Only the tokens of the texts count as progress, without padding.
        self.tokens_per_sample = round(mean_tokens(samples, self._config, self._spec))
        # transformers notes dtype and attention in the configuration that it is given.
        self.model = build_model(copy.deepcopy(self._config), objective, self.knobs, self.strategy.device)
        # Counted before the strategy cuts the model into pieces; shapes are enough, there are no weights yet.
        share = recomputed_share(self.model)
        chunked = head_loss.actual(self.model)["loss_function"] == "chunked"
        self._flops = flops_per_sample(self.model, objective, self.tokens_per_sample, share, recomputes_logits=chunked)
        self.engine.prepare(self.model)
        # Weights are the same on every rank; dropout is not.
        torch.manual_seed(self.knobs.seed + self.strategy.dropout_rank)
        module, _ = self.engine.live()
        self._is_compiled = isinstance(module, OptimizedModule) or bool(compiled_blocks(self.model))
        self._compute_dtype = ComputeDtype(module, self._is_compiled)

    def recorder(
        self, write: Callable[[dict[str, Any]], object], log: WorkerLog, memory: MemoryMeter, timing_warmup: int
    ) -> StepRecorder:
        """Make the recorder of the next steps, the first `timing_warmup` of them warm-up; `write` gets each record."""
        samples = self.knobs.batch_size * self.knobs.grad_accum
        return StepRecorder(
            write,
            log,
            memory,
            make_clock(self.strategy.device),
            samples=samples,
            tokens=self.batches.take_tokens
            if isinstance(self.batches, CountedBatches)
            else samples * self.tokens_per_sample,
            timing_warmup=timing_warmup,
            compile_watch=CompileWatch(memory) if self._is_compiled or self._optimizer.compiles else None,
            last_scale=self.strategy.precision.initial_scale(),
            write_actual=partial(self.write_actual, log),
        )

    def write_actual(self, log: WorkerLog) -> None:
        """Write the `actual` record, read from the live objects."""
        model, strategy, flops = self.model, self.strategy, self._flops
        module, optimizer = self.engine.live()
        config: Any = model.config
        text, device = text_part(config), strategy.device
        read_fields = {**NULL_UNLESS_READ, **strategy.actual_fields(unwrap(module))}
        log.write(
            "actual",
            **read_fields,
            engine=self.engine.name,
            optimizer=class_name(optimizer),
            optimizer_implementation=implementation(optimizer),
            param_dtype=dtype_name(next(module.parameters()).dtype),
            compute_dtype=self._compute_dtype.name,
            attention=attention_of(model),
            attention_reason=attention_reason(model, self.knobs),
            dropout=any(isinstance(rate, float) and rate > 0 for name, rate in vars(text).items() if "drop" in name),
            **lever_fields(model),
            **float8.actual(model),
            world_size=torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
            # torchrun's variable: the number of its agents.
            nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
            device=device.type,
            device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            compiled=self._is_compiled,
            model_type=config.model_type,
            parameters=sum(whole_size(parameter) for parameter in model.parameters()),
            trainable_parameters=sum(whole_size(p) for p in model.parameters() if p.requires_grad),
            model_flops_per_sample=flops.model if flops else None,
            recomputed_flops_per_sample=flops.recomputed if flops else None,
            notebook_flops_per_sample=flops.notebook if flops else None,
            layers=getattr(text, "num_hidden_layers", None),
            hidden_size=getattr(text, "hidden_size", None),
            vocab_size=getattr(text, "vocab_size", None),
            loader_workers_alive=len(multiprocessing.active_children()),
        )
