"""The global batch of a best-fit search: batch_size x grad_accum x the data-parallel ranks of the strategy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property

from trainfast_runner.errors import UserError
from trainfast_runner.machine.devices import Machine
from trainfast_runner.search.candidate_spec import BATCH_KNOBS, MESH_KNOBS, candidate_spec
from trainfast_runner.settings.device_counts import data_parallel_degree, device_count
from trainfast_runner.settings.knob_type import KnobValues, whole_number
from trainfast_runner.settings.knob_values import KnobValue
from trainfast_runner.settings.spec import RunSpec
from trainfast_runner.settings.vary import Vary, combinations_of

MAX_CANDIDATES = 5000
"""A search has at most this many candidates."""
MAX_COUNTED = 1_000_000
"""Up to this many combinations of batch, accumulation and strategy are tested one by one to count candidates."""


def default_global_batch(spec: RunSpec, machine: Machine) -> int:
    """Return the samples of one optimizer step of the preset. Raises UserError when there are too few devices."""
    preset_spec = candidate_spec(spec, {})
    batch, accumulation = (whole_number(preset_spec.knobs, name) for name in BATCH_KNOBS)
    return batch * accumulation * data_parallel_degree(preset_spec.knobs, device_count(preset_spec, machine))


class GlobalBatch:
    """The combinations of varied values that have a global batch of `size`; None leaves it free."""

    def __init__(self, spec: RunSpec, machine: Machine, vary: Vary, size: int | None) -> None:
        self._spec, self._machine, self._vary, self.size = spec, machine, vary, size
        self._degrees: dict[tuple[KnobValue, ...], int] = {}
        self._deciding = {name: values for name, values in vary.items() if name in (*BATCH_KNOBS, *MESH_KNOBS)}
        """The varied knobs on which the global batch depends."""

    @property
    def derives_knobs(self) -> bool:
        """True if the batch or the accumulation of a combination follows from its other knobs."""
        return self.size is not None and bool(self._deciding)

    def degree(self, knobs: Mapping[str, KnobValue]) -> int:
        """Return the data-parallel degree with these knobs; 1 with too few devices, which is refused later."""
        key = tuple(knobs.get(name, self._spec.knobs[name]) for name in MESH_KNOBS)
        if key not in self._degrees:
            run_spec = candidate_spec(self._spec, dict(zip(MESH_KNOBS, key, strict=True)))
            try:
                self._degrees[key] = data_parallel_degree(run_spec.knobs, device_count(run_spec, self._machine))
            except UserError:
                self._degrees[key] = 1
        return self._degrees[key]

    def complete(self, values: KnobValues) -> KnobValues | None:
        """Return a combination with the batch and accumulation of this size; None if it has another global batch."""
        if self.size is None:
            return values
        batch, accumulation = (
            whole_number(values if name in values else self._spec.knobs, name) for name in BATCH_KNOBS
        )
        per_rank, remainder = divmod(self.size, self.degree(values))
        if remainder:
            return None
        if "batch_size" in self._vary and "grad_accum" in self._vary:
            return values if batch * accumulation == per_rank else None
        if "batch_size" in self._vary:
            return None if per_rank % batch else {**values, "grad_accum": per_rank // batch}
        if per_rank % accumulation == 0:
            return {**values, "batch_size": per_rank // accumulation, "grad_accum": accumulation}
        if "grad_accum" in self._vary or per_rank % batch:
            return None
        return {**values, "batch_size": batch, "grad_accum": per_rank // batch}

    def baseline_knobs(self) -> KnobValues:
        """Return the preset's knobs at this size: its batch size, or the next smaller one that divides.

        Raises UserError if the data-parallel degree does not divide the size.
        """
        knobs = self._spec.knobs
        if self.size is None:
            return knobs
        degree = self.degree(knobs)
        per_rank, remainder = divmod(self.size, degree)
        if remainder:
            raise self._impossible_error([size for size in (per_rank * degree, (per_rank + 1) * degree) if size])
        max_batch = min(whole_number(knobs, "batch_size"), per_rank)
        batch = next(size for size in range(max_batch, 0, -1) if per_rank % size == 0)
        return {**knobs, "batch_size": batch, "grad_accum": per_rank // batch}

    def count(self) -> int:
        """Return the number of combinations of this size, without listing them; all of them beyond `MAX_COUNTED`."""
        other_count = math.prod(len(values) for name, values in self._vary.items() if name not in self._deciding)
        combination_count = math.prod(map(len, self._deciding.values()))
        if self.size is None or combination_count > MAX_COUNTED or other_count > MAX_CANDIDATES:
            return other_count * combination_count
        return other_count * len(self._possible)

    def occurring_values(self) -> dict[str, list[KnobValue]]:
        """Return the varied values without those that no combination of this size has."""
        return {
            name: [
                value
                for value in values
                if name not in self._deciding or any(knobs[name] == value for knobs in self._possible)
            ]
            for name, values in self._vary.items()
        }

    @cached_property
    def _possible(self) -> list[KnobValues]:
        """The combinations of the deciding knobs that have this size."""
        return [knobs for knobs in combinations_of(self._deciding) if self.complete(knobs) is not None]

    def nearest_error(self) -> UserError:
        """Return the error about a size that no combination has, with the nearest sizes below and above."""
        wanted_size = self.size or 0
        attainable: set[int] = set()
        for combination in combinations_of(self._deciding):
            knobs = {**self._spec.knobs, **combination}
            degree, sizes = self.degree(knobs), {name: whole_number(knobs, name) for name in BATCH_KNOBS}
            varied_names = [name for name in BATCH_KNOBS if name in self._deciding]
            if len(varied_names) == len(BATCH_KNOBS):
                attainable.add(degree * math.prod(sizes.values()))
                continue
            # A knob that is not varied makes any multiple of the other one.
            units = {degree * sizes[name] for name in varied_names or BATCH_KNOBS}
            attainable |= {
                unit * count for unit in units for count in (max(1, wanted_size // unit), wanted_size // unit + 1)
            }
        size_below = max((size for size in attainable if size < wanted_size), default=None)
        size_above = min((size for size in attainable if size > wanted_size), default=None)
        return self._impossible_error([size for size in (size_below, size_above) if size is not None])

    def _impossible_error(self, attainable: list[int]) -> UserError:
        nearest = min(attainable, key=lambda size: abs(size - (self.size or 0)), default=None)
        return UserError(
            f"--global-batch {self.size}: no batch_size x grad_accum x data-parallel degree gives it",
            key="--global-batch",
            allowed=[str(size) for size in sorted(attainable)],
            nearest=None if nearest is None else str(nearest),
        )
