"""Everything that the training steps of one setting use: strategy, engine, loader, model and optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from .data.batches import Samples, batches_of, mean_tokens
from .data.samples import Batch, CountedBatches, WholeTexts
from .engines.base import make_engine
from .model.build import SdpaBackend, attention_of, attention_reason, build_model
from .model.compilation import CompileWatch, unwrap
from .model.flops import SampleFlops, flops_per_sample
from .model.objective import Objective
from .model.optimizer import import_optimizer_code
from .records.actual_record import ComputeDtype, actual_fields
from .records.record_file import WorkerLog
from .records.step_log import StepLog
from .spec import RankSpec
from .strategies.base import make_strategy


class TrainState:
    """Strategy and engine that the knobs of `spec` name; the loader from `load` on, the model from `build` on."""

    model: torch.nn.Module
    _tokens_per_sample: int
    _flops: SampleFlops | None
    _is_compiled: bool
    _compute_dtype: ComputeDtype
    _sdpa: SdpaBackend

    def __init__(self, spec: RankSpec, config: Any, device: torch.device) -> None:
        """Make strategy and engine. Raises InvalidInput for knobs that either cannot obey."""
        import_optimizer_code(spec.knobs.optimizer)
        self.strategy = make_strategy(spec.knobs, device)
        # One process loads for all of its devices.
        self.knobs = replace(spec.knobs, batch_size=spec.knobs.batch_size * self.strategy.batch_shares)
        self.engine = make_engine(self.knobs, self.strategy, Objective(spec.data.objective))
        self.batches: Iterator[Batch] = iter(())
        self._spec = replace(spec, knobs=self.knobs)
        self._config = config

    def load(self, samples: Samples, steps: int, worker_init_fn: Callable[[int], None] | None) -> None:
        """Start the loader for `steps` steps; each loader process first calls `worker_init_fn` with its number."""
        knobs = replace(self.knobs, steps=steps)
        self.batches = batches_of(samples, knobs, self.strategy.dp_rank, self.strategy.dp_degree, worker_init_fn)
        if isinstance(samples, WholeTexts):
            self.batches = CountedBatches(self.batches)

    def build(self, samples: Samples) -> None:
        """Build the model, and wrap it with its optimizer."""
        objective = self._spec.data.objective
        # Only the tokens of the texts count as progress, without padding.
        self._tokens_per_sample = round(mean_tokens(samples, self._config, self._spec))
        # transformers notes dtype and attention in the configuration that it is given.
        self.model = build_model(copy.deepcopy(self._config), objective, self.knobs, self.strategy.device)
        # Counted before the strategy cuts the model into pieces; shapes are enough, there are no weights yet.
        self._flops = flops_per_sample(self.model, objective, self._tokens_per_sample, self.knobs.checkpointing)
        self.engine.prepare(self.model)
        # Weights are the same on every rank; dropout is not.
        torch.manual_seed(self.knobs.seed + self.strategy.dropout_rank)
        module, _ = self.engine.live()
        self._is_compiled = module is not unwrap(module)
        self._compute_dtype = ComputeDtype(module, self._is_compiled)
        self._sdpa = SdpaBackend(attention_of(self.model) == "sdpa" and not self._is_compiled)

    def step_log(self, write: Callable[[dict[str, Any]], object], log: WorkerLog, timing_warmup: int) -> StepLog:
        """Make the log of the next steps, the first `timing_warmup` of them warm-up; `write` gets each record."""
        samples = self.knobs.batch_size * self.knobs.grad_accum
        return StepLog(
            write,
            log,
            samples=samples,
            tokens=self.batches.take_tokens
            if isinstance(self.batches, CountedBatches)
            else samples * self._tokens_per_sample,
            timing_warmup=timing_warmup,
            compile_watch=CompileWatch() if self._is_compiled else None,
            initial_scale=self.strategy.precision.initial_scale(),
        )

    def write_actual(self, log: WorkerLog) -> None:
        """Write the `actual` record, read from the live objects."""
        log.write(
            "actual",
            engine=self.engine.name,
            sdpa_backend=self._sdpa.name,
            attention_reason=attention_reason(self.model, self.knobs),
            compute_dtype=self._compute_dtype.name,
            **actual_fields(self.model, *self.engine.live(), self.strategy, self._flops),
        )
