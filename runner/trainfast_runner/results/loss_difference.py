"""The difference of a run's first losses from those of a run on the same samples whose levers are plain."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.records.json_lines import Tail
from trainfast_runner.records.result import LOSSES_IN_A_MEAN, LossDifference
from trainfast_runner.records.run_directory import RunRecords, rank_file, read_result, read_run_file
from trainfast_runner.records.run_file import RecordedKnobs
from trainfast_runner.records.run_lines import Step
from trainfast_runner.records.worker_lines import ActualLine, newest_of_first_rank
from trainfast_runner.worker.catalog import LEVERS

Pairs = Iterable[tuple[float | None, float | None]]
"""Losses of the same steps of two runs."""
HALF_PRECISION_TOLERANCE = 1e-2
"""Greatest relative difference of a step's loss by a lever in half precision, and with TF32."""
WITHOUT_EFFECT = (
    *("steps", "timing_warmup", "watch", "memory_limit", "workers", "pin_memory", "prefetch"),
    *("devices", "p2p", "offload_path"),
)
"""Knobs that change no loss: the learning rate, which a schedule takes from `steps`, is compared step by step."""
SAME = ("script", "model", "data", "device", "world_size", "device_names", "versions")
"""Fields of `run.json` that are equal in runs which compare."""
RUNS_LOOKED_AT = 20
"""Newest runs of the home among which a plain one is sought."""
HEAD_BYTES = 16 << 10
"""Part of `steps.jsonl` that holds the first steps."""


def loss_difference(
    knobs: RecordedKnobs, plain: RecordedKnobs, pairs: Pairs, *, redraws: bool, against: str = ""
) -> LossDifference | None:
    """The greatest relative difference of the first losses, in pairs with the plain ones, and what levers may cause.

    None without losses, and unless the two differ in levers alone of what losses depend on; neither in one that draws
    the masks of dropout anew while `redraws` is true.
    """
    tolerances: list[float | None] = []
    for name in {*knobs, *plain}.difference(WITHOUT_EFFECT):
        if knobs.get(name) == plain.get(name):
            continue
        lever = LEVERS.get(name)
        if lever is None or (redraws and lever.redraws_dropout):
            return None
        tolerances += [lever[knobs.get(name)].tolerance, lever[plain.get(name)].tolerance]
    shares = [abs(a - b) / abs(b) for a, b in itertools.islice(pairs, LOSSES_IN_A_MEAN) if a is not None and b]
    if not shares or not any(tolerances) or None in tolerances:
        return None
    least = 0.0 if knobs.get("precision", "fp32") == "fp32" else HALF_PRECISION_TOLERANCE
    tolerance = max(least, *filter(None, tolerances))
    return LossDifference(greatest=max(shares), tolerance=tolerance, steps=len(shares), against=against)


def loss_difference_of(directory: Path, records: RunRecords) -> LossDifference | None:
    """The difference from the newest finished run of the home that has the same settings with plainer levers."""
    run, ran = records.run, newest_of_first_rank(records.worker_lines, ActualLine)
    if run is None or run.script is not None or not _turned(run.knobs):
        return None
    with suppress(OSError, UserError):  # without a readable history there is nothing to compare with
        home = Home.of_run(directory)
        for other in map(home.directory, home.newest_run_ids(RUNS_LOOKED_AT)):
            plain = read_run_file(other)
            if plain is None or any(getattr(run, name) != getattr(plain, name) for name in SAME):
                continue
            pairs = list(zip(_first_steps(directory), _first_steps(other), strict=False))
            is_same = all((a.step, a.samples, a.tokens, a.lr) == (b.step, b.samples, b.tokens, b.lr) for a, b in pairs)
            if not is_same or not _turned(plain.knobs) < _turned(run.knobs):
                continue
            losses, redraws = [(a.loss, b.loss) for a, b in pairs], ran is None or ran.dropout is not False
            found = loss_difference(run.knobs, plain.knobs, losses, redraws=redraws, against=other.name)
            if found is not None and (result := read_result(other)) is not None and result.state == "finished":
                return found
    return None


def _turned(knobs: RecordedKnobs) -> set[tuple[str, Any]]:
    """The levers with a value that may change a loss."""
    return {(name, knobs.get(name)) for name, lever in LEVERS.items() if lever[knobs.get(name)].tolerance}


def _first_steps(directory: Path) -> list[Step]:
    """The first steps of rank 0."""
    return Tail(rank_file(directory, "steps", 0), Step, HEAD_BYTES).new()[:LOSSES_IN_A_MEAN]
