"""The native loop against the Hugging Face Trainer on one spec: blocks of steps of each, in turn, in one process.

    python benchmarks/engines.py [--pairs 20]

Below the budget our loop would be slower than what a user has already; far above it, it would leave something out.
"""

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # As a script, Python looks for modules beside this file only.
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.budget import Row, print_table
from benchmarks.step_records import recorder_of, training

BUDGET = (0.97, 1.15)
BLOCK_STEPS = 6
"""The first is left out: what an engine does before it takes steps falls into it."""


@dataclass(frozen=True)
class Race:
    """`ratio` is the native engine's median samples/s over the Trainer's; `quartiles` are those of pairs of blocks."""

    pairs: int
    native_samples_per_s: float
    trainer_samples_per_s: float
    ratio: float
    quartiles: tuple[float, float]


class Kept:
    """A step log that keeps the times in memory."""

    def __init__(self) -> None:
        self.step_ms: list[float] = []

    def add(self, step: int, times: Any, *_: Any) -> None:
        """Note a step's time; the first of a block is none."""
        if step > 1:
            self.step_ms.append(times()[1]["step_ms"])

    def take(self) -> list[float]:
        """The times of the block that ended, in ms."""
        block, self.step_ms = self.step_ms, []
        return block


def measure(pairs: int = 20) -> Race:
    """Train tiny-llama on short samples in `pairs` pairs of blocks, after one pair to warm up."""
    with ExitStack() as stack:
        racers = []
        for engine in ("native", "trainer"):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            steps = (pairs + 1) * BLOCK_STEPS
            prepared, _ = stack.enter_context(training(Path(folder), steps, f"engine={engine}", "seq_len=64"))
            log = Kept()
            racers.append((prepared, recorder_of(prepared, log), log))
        knobs = replace(racers[0][0].state.knobs, steps=BLOCK_STEPS)
        samples = knobs.batch_size * knobs.grad_accum
        blocks: list[list[list[float]]] = [[], []]
        for pair in range(pairs + 1):
            for place in (0, 1) if pair % 2 else (1, 0):
                prepared, recorder, log = racers[place]
                prepared.state.engine.train(knobs, prepared.state.batches, recorder)
                blocks[place].append([1000 * samples / step_ms for step_ms in log.take()])
    native, trainer = (each[1:] for each in blocks)
    low, _, high = statistics.quantiles(
        (statistics.median(ours) / statistics.median(theirs) for ours, theirs in zip(native, trainer, strict=True)), n=4
    )
    rates = [statistics.median(rate for block in each for rate in block) for each in (native, trainer)]
    return Race(pairs, rates[0], rates[1], rates[0] / rates[1], (low, high))


def rows(race: Race) -> list[Row]:
    """The race as a row of the table of budgets: what, measured, budget, held."""
    return [
        (
            f"engine=native over engine=trainer, {race.pairs} pairs of {BLOCK_STEPS - 1} steps",
            f"{race.ratio:.3f} (quartiles {race.quartiles[0]:.3f} to {race.quartiles[1]:.3f};"
            f" {race.native_samples_per_s:.1f} and {race.trainer_samples_per_s:.1f} samples/s)",
            f"{BUDGET[0]:g} to {BUDGET[1]:g}",
            BUDGET[0] <= race.ratio <= BUDGET[1],
        )
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=20)
    raise SystemExit(print_table(rows(measure(parser.parse_args().pairs))))
