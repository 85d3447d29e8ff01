"""The difference of a run's first losses from those of a run on the same samples whose levers are plain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainfast_runner.records.home import Home
from trainfast_runner.records.json_lines import Tail
from trainfast_runner.records.result import LOSSES_IN_A_MEAN, LossDifference
from trainfast_runner.records.run_directory import RunRecords, rank_file, read_result, read_run_file
from trainfast_runner.records.run_lines import Step
from trainfast_runner.records.worker_lines import ActualLine, newest_of_first_rank
from trainfast_runner.worker.catalog import LEVERS

HALF_PRECISION_TOLERANCE = 1e-2
"""Greatest relative difference of a step's loss by a lever in half precision, and with TF32."""
WITHOUT_EFFECT = ("steps", "timing_warmup", "watch", "memory_limit", "workers", "pin_memory", "prefetch")
"""Knobs that change no loss: the learning rate, which a schedule takes from `steps`, is compared step by step."""
RUNS_LOOKED_AT = 20
"""Newest runs of the home among which a plain one is sought."""
HEAD_BYTES = 16 << 10
"""Part of `steps.jsonl` that holds the first steps."""


def loss_tolerance(knobs: Mapping[str, Any], plain: Mapping[str, Any], *, redraws: bool = False) -> float | None:
    """The greatest relative difference that a step's loss may have by the levers in which these knobs differ.

    None without such a lever, and if they differ in anything else that losses depend on, or in a lever that draws the
    masks of dropout anew while `redraws` is true.
    """
    tolerances: list[float | None] = []
    for name in {*knobs, *plain}.difference(WITHOUT_EFFECT):
        if knobs.get(name) == plain.get(name):
            continue
        lever = LEVERS.get(name)
        if lever is None or (redraws and lever.redraws_dropout):
            return None
        tolerances += [lever[knobs.get(name)].tolerance, lever[plain.get(name)].tolerance]
    if not any(tolerances) or None in tolerances:
        return None
    least = 0.0 if knobs.get("precision", "fp32") == "fp32" else HALF_PRECISION_TOLERANCE
    return max(least, *filter(None, tolerances))


def greatest_difference(
    losses: Sequence[float | None], plain_losses: Sequence[float | None]
) -> tuple[float, int] | None:
    """The greatest relative difference of the first losses, and their number; None without losses in both."""
    differences = [
        abs(loss - plain_loss) / abs(plain_loss)
        for loss, plain_loss in list(zip(losses, plain_losses, strict=False))[:LOSSES_IN_A_MEAN]
        if loss is not None and plain_loss
    ]
    return (max(differences), len(differences)) if differences else None


def loss_difference_of(directory: Path, records: RunRecords) -> LossDifference | None:
    """The difference from the newest finished run of the home that has the same settings with plainer levers."""
    run, ran = records.run, newest_of_first_rank(records.worker_lines, ActualLine)
    if run is None or run.script is not None or not _turned(run.knobs):
        return None
    steps, home = _first_steps(directory), Home.of_run(directory)
    for other in map(home.directory, home.newest_run_ids(RUNS_LOOKED_AT)):
        plain = read_run_file(other)
        if plain is None or other.name == directory.name or plain.script is not None:
            continue
        named = ("model", "data", "device", "world_size", "device_names", "versions")
        if not _turned(plain.knobs) < _turned(run.knobs):
            continue
        tolerance = loss_tolerance(run.knobs, plain.knobs, redraws=ran is None or ran.dropout is not False)
        if tolerance is None or any(getattr(run, name) != getattr(plain, name) for name in named):
            continue
        found, result = _first_steps(other), read_result(other)
        pairs = list(zip(steps, found, strict=False))
        same = all((a.step, a.samples, a.tokens, a.lr) == (b.step, b.samples, b.tokens, b.lr) for a, b in pairs)
        greatest = greatest_difference([a.loss for a, _ in pairs], [b.loss for _, b in pairs])
        if same and greatest is not None and result is not None and result.state == "finished":
            return LossDifference(greatest=greatest[0], tolerance=tolerance, steps=greatest[1], against=other.name)
    return None


def _turned(knobs: Mapping[str, Any]) -> set[tuple[str, Any]]:
    """The levers with a value that may change a loss."""
    return {(name, knobs.get(name)) for name, lever in LEVERS.items() if lever[knobs.get(name)].tolerance}


def _first_steps(directory: Path) -> list[Step]:
    """The first steps of rank 0; empty if they cannot be read."""
    with suppress(OSError):
        return Tail(rank_file(directory, "steps", 0), Step, HEAD_BYTES).new()[:LOSSES_IN_A_MEAN]
    return []
