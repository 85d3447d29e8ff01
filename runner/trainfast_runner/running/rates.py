"""The throughput of a run's steps, summed over its ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainfast_runner.records.run_lines import Step


@dataclass(frozen=True, slots=True)
class Rates:
    """Throughput of each step, by its number, summed over data-parallel ranks; all have one length. Newest last.

    `tokens_per_s` are None for a model without tokens.
    """

    steps: tuple[int, ...] = ()
    times_ns: tuple[int, ...] = ()
    samples_per_s: tuple[float, ...] = ()
    tokens_per_s: tuple[float | None, ...] = ()


class SummedRates:
    """Adds up the ranks' rates of a step once all have written it; keeps the newest `keep` steps, or all."""

    def __init__(self, keep: int | None) -> None:
        self._keep = keep
        self._summed: deque[tuple[int, int, float, float | None]] = deque(maxlen=keep)
        """Number and end of a step, its samples and tokens a second."""
        self._waiting: dict[int, list[Step]] = {}

    def add(self, rank: int, steps: Iterable[Step], sampling_ranks: int) -> None:
        """Add steps of a rank, in a run whose first `sampling_ranks` ranks have samples of their own."""
        if rank >= sampling_ranks:
            return
        for step in steps:
            if step.step_ms <= 0 or step.samples is None:
                continue
            steps_of_ranks = self._waiting.setdefault(step.step, [])
            steps_of_ranks.append(step)
            if len(steps_of_ranks) < sampling_ranks:
                continue
            samples_per_s = sum(1e3 * (rank_step.samples or 0) / rank_step.step_ms for rank_step in steps_of_ranks)
            ended_ns = max(rank_step.t_ns for rank_step in steps_of_ranks)
            self._summed.append((step.step, ended_ns, samples_per_s, _summed_tokens_per_s(steps_of_ranks)))
            del self._waiting[step.step]
        if self._keep is not None and len(self._waiting) > self._keep:
            # A rank has stopped writing: the steps of the others alone are no throughput of the run.
            for number in sorted(self._waiting)[: -self._keep]:
                del self._waiting[number]

    def rates(self) -> Rates:
        """Return the rates of the steps kept."""
        return Rates(*zip(*self._summed, strict=True))


def _summed_tokens_per_s(steps_of_ranks: Sequence[Step]) -> float | None:
    """Return the tokens/s of the ranks' parts of one step together; None if the model has no tokens."""
    if any(rank_step.tokens is None for rank_step in steps_of_ranks):
        return None
    return sum(1e3 * (rank_step.tokens or 0) / rank_step.step_ms for rank_step in steps_of_ranks)
