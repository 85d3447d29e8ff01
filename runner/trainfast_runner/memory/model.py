"""The memory model of one model: its traced live bytes, and the arithmetic from them to a prediction and to work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from trainfast_runner.memory import sharding
from trainfast_runner.memory.corrections import (
    NOT_TRACED,
    Correction,
    DeviceCorrections,
    correction_key,
    read_device_corrections,
)
from trainfast_runner.memory.pipeline import StagePeaks, stage_peaks
from trainfast_runner.memory.timeline import CATEGORIES, Moment, RankBytes, WholeModel, Work, blocks_of, moments
from trainfast_runner.records.run_file import Prediction
from trainfast_runner.settings.device_counts import data_parallel_degree
from trainfast_runner.settings.knob_values import whole_number
from trainfast_runner.settings.spec import RunSpec
from trainfast_runner.units import largest_fitting
from trainfast_runner.worker.shared import words

MAX_BATCH = 1 << 24
"""Chosen, not measured: the largest batch that is looked for, more than any device holds."""


class MemoryModel(WholeModel, frozen=True, kw_only=True, dict=True):
    """A model whose memory is predicted."""

    basis: str = ""
    trace: str = ""
    """The name of the trace, by which corrections are kept."""
    optimizer_work: Work = words.NO_WORK
    """The work of the optimizer's step on the whole model."""
    corrections: DeviceCorrections = DeviceCorrections()
    """The corrections by this machine's runs, added when the model is read."""

    def corrected_for(self, gpu: str | None) -> MemoryModel:
        """The model with the corrections of a GPU of this name."""
        if self.device != "cuda":
            return self
        return msgspec.structs.replace(self, corrections=read_device_corrections(self.device, gpu))

    def predict(self, spec: RunSpec, ranks: int = 1) -> Prediction:
        """Predict the peak of the fullest of `ranks` processes with the knobs of `spec`; well under 50 ms."""
        batch = whole_number(spec.knobs, "batch_size")
        traced_peaks = self._peaks(spec, ranks, batch)
        peaks = self._corrected(spec, ranks, traced_peaks)
        larger_peaks = self._corrected(spec, ranks, self._peaks(spec, ranks, batch + 1))
        phase = max(words.MEMORY_PHASES, key=lambda name: sum(peaks[name]))
        bytes_per_sample = round(sum(larger_peaks[phase]) - sum(peaks[phase]))
        rounded_peaks = {name: [round(value) for value in peaks[name]] for name in words.MEMORY_PHASES}
        return Prediction(
            total_bytes=sum(rounded_peaks[phase]),
            **{f"{name}_bytes": value for name, value in zip(CATEGORIES, rounded_peaks[phase], strict=True)},
            phase=phase,
            phases={
                name: {**dict(zip(CATEGORIES, values, strict=True)), "total": sum(values)}
                for name, values in rounded_peaks.items()
            },
            fixed_bytes=sum(rounded_peaks[phase]) - batch * bytes_per_sample,
            bytes_per_sample=bytes_per_sample,
            context_bytes=self.corrections.context_bytes if self.device == "cuda" else None,
            basis=self._basis(spec, ranks),
            attention=self.attention,
            trace=self.trace,
            fullest=self._fullest(spec, ranks, batch, phase),
            traced_bytes={name: round(sum(values)) for name, values in traced_peaks.items()},
        )

    def max_batch(self, spec: RunSpec, ranks: int, limit_bytes: int) -> int:
        """The largest `batch_size` whose predicted peak is within `limit_bytes` per rank; 0 if not even one fits."""

        def fits(batch: int) -> bool:
            # As a prediction adds the categories: each in whole bytes.
            peaks = self._corrected(spec, ranks, self._peaks(spec, ranks, batch)).values()
            return max(sum(map(round, peak)) for peak in peaks) <= limit_bytes

        return largest_fitting(fits, MAX_BATCH, batch_multiple(spec.knobs))

    def _basis(self, spec: RunSpec, ranks: int) -> str:
        if (correction := self.correction_for(spec, ranks)) is not None:
            return f"{self.basis}, corrected by {correction.run_id}"
        basis, strategy = self.basis, spec.knobs["strategy"]
        if strategy in sharding.UNCONFIRMED_STRATEGIES:
            basis += f", and rules for {strategy} that no run has confirmed"
        if not_traced := [memory for name, values, memory in NOT_TRACED if spec.knobs[name] in values]:
            basis += f", without {' and '.join(not_traced)}: that is known from the first measured run on"
        return basis

    def _fullest(self, spec: RunSpec, ranks: int, batch: int, phase: str) -> str:
        strategy = spec.knobs["strategy"]
        if strategy == sharding.DATA_PARALLEL:
            return f"the first of {sharding.devices_of(spec.knobs)} GPUs, which gathers the outputs of all"
        if strategy not in sharding.STAGED_STRATEGIES:
            return ""
        rank = self._stages(spec, ranks, batch).ranks[phase]
        if strategy == sharding.LAYERS_SPREAD:
            return f"GPU {rank + 1} of the {sharding.devices_of(spec.knobs)} that the layers are spread over"
        return f"rank {rank} of a pipeline of {spec.knobs['pp_degree']}"

    def correction_for(self, spec: RunSpec, ranks: int) -> Correction | None:
        """The correction by this machine's run of the same case; None before any."""
        return self.corrections.by_case.get(correction_key(self.trace, spec.knobs, ranks))

    def _corrected(self, spec: RunSpec, ranks: int, peaks: dict[str, RankBytes]) -> dict[str, RankBytes]:
        """The corrected peaks: a difference changes temporary bytes, then activations once no such bytes are left."""
        correction = self.correction_for(spec, ranks)
        if correction is None:
            return peaks
        step_bytes, corrected_peaks = sum(peaks["forward_backward"]), {}
        for phase, peak in peaks.items():
            beyond_bytes = correction.beyond(phase, spec.knobs, step_bytes)
            to_temporary = max(-peak.temporary, beyond_bytes)
            to_activations = max(-peak.activations, beyond_bytes - to_temporary)
            corrected_peaks[phase] = peak._replace(
                temporary=peak.temporary + to_temporary, activations=peak.activations + to_activations
            )
        return corrected_peaks

    def _peaks(self, spec: RunSpec, ranks: int, batch: int) -> dict[str, RankBytes]:
        """Each phase's peak of the fullest rank, with the workspaces of libraries."""
        knobs = spec.knobs
        if knobs["strategy"] in sharding.STAGED_STRATEGIES:
            peaks = self._stages(spec, ranks, batch).phases
        else:
            segments = self.segments
            if knobs["strategy"] == sharding.DATA_PARALLEL:
                segments = sharding.first_gpu_segments(segments, sharding.devices_of(knobs))
            rule = sharding.memory_rule(knobs, ranks, self)
            # Before the step there are parameters, buffers and optimizer states.
            start = tuple(
                value if index in (*words.WEIGHTS, words.OPTIMIZER) else 0.0
                for index, value in enumerate(self.before_optimizer)
            )
            step = list(moments(segments, self.stacks, start, batch, whole_number(knobs, "grad_accum")))
            # The optimizer's step is on top of what forward and backward left: the batch itself.
            live = list(self.optimizer_peak)
            live[words.ACTIVATIONS] += step[-1].live[words.ACTIVATIONS]
            peaks = {
                "forward_backward": max(map(rule, step), key=sum),
                "optimizer": rule(Moment(tuple(live), "optimizer")),
            }
        return {phase: peak._replace(temporary=peak.temporary + self.library_bytes) for phase, peak in peaks.items()}

    def _stages(self, spec: RunSpec, ranks: int, batch: int) -> StagePeaks:
        return stage_peaks(self, {**spec.knobs, "batch_size": batch}, data_parallel_degree(spec.knobs, ranks))


def batch_multiple(knobs: Mapping[str, Any]) -> int:
    """The number that every batch size is a multiple of: a pipeline cuts the batch into equal parts."""
    return whole_number(knobs, "micro_batches") if knobs["strategy"] in sharding.PIPELINE_STRATEGIES else 1


class StepWork(NamedTuple):
    """Work of one rank: calls of operations, FLOPs of products, bytes read and written."""

    calls: float
    flops: float
    moved_bytes: float


def step_work(model: MemoryModel, batch_size: int, grad_accum: int) -> StepWork:
    """Return the work of an optimizer step with `grad_accum` micro-batches of `batch_size` samples.

    As one rank does it alone: without communication, and without the work that sharding saves or adds.
    """
    total = list(model.optimizer_work)
    for segment in model.segments:
        times = blocks_of(segment, model.stacks).copies * _times(segment.micro, segment.phase, grad_accum)
        for index, (fixed, per_sample) in enumerate(zip(*segment.work, strict=True)):
            total[index] += times * (fixed + batch_size * per_sample)
    return StepWork(*total)


def _times(micro: int, phase: str, grad_accum: int) -> float:
    """Occurrences of a traced segment in a step: the last traced micro-batch stands for all that follow it."""
    if phase == "data":
        return grad_accum / words.TRACED_MICRO_BATCHES
    return max(0, grad_accum - words.TRACED_MICRO_BATCHES + 1) if micro == words.TRACED_MICRO_BATCHES else 1
