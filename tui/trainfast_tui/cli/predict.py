"""`predict`: the memory of a run by category and its speed, without running it."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from trainfast_runner.memory import corrections
from trainfast_runner.memory.headroom import PredictedFit
from trainfast_runner.memory.predict_rows import (
    PredictedRow,
    RunToPredict,
    predict_rows,
    published_bytes,
    runs_to_predict,
)
from trainfast_runner.memory.tracing import Tracing
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_file import SCHEMA, PredictedSpeed
from trainfast_runner.search.speed.predicted_speed import Unknown
from trainfast_runner.search.speed.speeds import predict_speed
from trainfast_tui.cli.output import GrowingTable, print_json, print_line, print_lines
from trainfast_tui.cli.progress import progress_when_slow
from trainfast_tui.cli.training_arguments import add_settings
from trainfast_tui.control.memory_view import importing
from trainfast_tui.text.format import ABSENT, count, delta, percent, plain, size
from trainfast_tui.text.memory import CATEGORIES, PHASES, short
from trainfast_tui.text.speed import speed_words
from trainfast_tui.text.tables import pairs

TRACING = "tracing a step without memory"
SIZE, DIFFERENCE = len("1023 MiB"), len("+1023 MiB (+100.0 %)")
PUBLISHED = ("published", "difference")
"""The columns with published figures."""
FITS = len("no, +1023 MiB")
"""The widest figures of their kind, in cells."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("preset", metavar="PRESET", help="a preset, each of its variants a row, or NAME/VARIANT")
    add_settings(parser)
    parser.add_argument("--python", metavar="PATH", help="the Python that would train, whatever torch it has")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print {predicted, phase, fits, max_batch, samples_per_s, seconds} or {rows}",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the prediction; return 0 if anything could be predicted, 2 if the only run could not.

    Return 3 if `memory_limit` is below the parameters' own memory.
    """
    began = time.monotonic()
    if (damage := corrections.read_trouble()) is not None:
        print(f"trainfast-tui: {plain(damage)}", file=sys.stderr)
    asked = runs_to_predict(arguments.preset, arguments.settings)
    table = _Table(asked) if len(asked) > 1 and not arguments.json else None
    answered = _predict(asked, arguments.python, table)
    if len(answered) == 1 and answered[0].error is not None:
        raise answered[0].error
    if arguments.json:
        rows = [_fields(one, _speed(one, arguments.python)) for one in answered]
        whole = (
            {"preset": arguments.preset, "rows": rows} if len(asked) > 1 else {"preset": arguments.preset, **rows[0]}
        )
        print_json({"schema": SCHEMA, **whole, "seconds": round(time.monotonic() - began, 3)})
    elif table is not None:
        _print_notes(answered)
    else:
        _print_one(answered[0], _speed(answered[0], arguments.python))
    hopeless = answered[0].hopeless if len(answered) == 1 else None
    if hopeless is None:
        return 0
    print(f"trainfast-tui: {plain(hopeless.line())}", file=sys.stderr)
    return hopeless.exit_code


def _predict(asked: list[RunToPredict], python: str | None, table: _Table | None) -> list[PredictedRow]:
    """Return the prediction of each run, with progress on stderr; rows are printed as soon as they are known."""
    found: dict[int, PredictedRow] = {}

    def show_tracing(tracing: Tracing) -> None:
        if tracing.importing:
            slow.update(plain(importing(tracing.importing)))
        elif tracing.words:
            what = TRACING
            if len(asked) > 1:
                what = f"tracing {plain(asked[tracing.place].id)}, {tracing.place + 1} of {len(asked)}"
            slow.update(f"{what}: {tracing.words}", tracing.done / tracing.total)

    with progress_when_slow(f"{TRACING}…", everywhere=len(asked) > 1) as slow:
        for place, answer in predict_rows(asked, python, show_tracing):
            found[place] = answer
            if table is not None and table.is_next(place):
                slow.print(lambda: table.print_ready(found))
    return [found[place] for place in range(len(asked))]


def _speed(answer: PredictedRow, python: str | None) -> PredictedSpeed | Unknown:
    """Return the run's predicted speed, or why there is none."""
    if answer.model is None or answer.machine is None:
        return Unknown("its memory is not predicted")
    return predict_speed(Home(), answer.asked.spec, answer.machine, answer.model, python)


def _fields(answer: PredictedRow, speed: PredictedSpeed | Unknown) -> dict[str, Any]:
    fit = answer.fit
    if fit is None:
        assert answer.error is not None
        return {"id": answer.asked.id, "predicted": None, "reason": answer.error.line()}
    predicted, available = fit.predicted, fit.available
    parts = {f"{name}_bytes": predicted.category(name) for name in CATEGORIES}
    return {
        "id": answer.asked.id,
        "predicted": {"total_bytes": predicted.total_bytes, **parts, "context_bytes": predicted.context_bytes},
        "phase": predicted.phase,
        "phases": predicted.phases,
        "fits": fit.fits,
        "needed_bytes": fit.needed_bytes,
        "margin_bytes": fit.margin_bytes,
        "limit_bytes": None if available is None else available.limit_bytes,
        "max_batch": fit.max_batch,
        "cannot_run": None if fit.cannot_run is None else fit.cannot_run.line(),
        "fullest": predicted.fullest or None,
        "basis": predicted.basis,
        "attention": predicted.attention or None,
        "samples_per_s": None if isinstance(speed, Unknown) else msgspec.to_builtins(speed),
        **({"why": speed.why} if isinstance(speed, Unknown) else {}),
        "published": dict(answer.asked.published) or None,
        "unpublished": answer.asked.unpublished or None,
    }


def _print_one(answer: PredictedRow, speed: PredictedSpeed | Unknown) -> None:
    fit = answer.fit
    assert fit is not None
    predicted = fit.predicted
    rows = [("peak memory", f"{size(predicted.total_bytes)} a rank, in {PHASES.get(predicted.phase, predicted.phase)}")]
    if predicted.fullest:
        rows.append(("fullest", predicted.fullest))
    for name, words in CATEGORIES.items():
        if value := predicted.category(name):
            rows.append((f"  {words}", f"{size(value)}  {percent(100 * value / predicted.total_bytes)}"))
    if predicted.context_bytes is not None:
        rows.append(("CUDA context", f"{size(predicted.context_bytes)} besides"))
    if (published := published_bytes(answer.asked.published)) is not None:
        rows.append(("published", size(published)))
    if predicted.bytes_per_sample:
        rows.append(("each sample", f"{size(predicted.bytes_per_sample)} on {size(predicted.fixed_bytes)}"))
    if fit.cannot_run is not None:
        rows.append(("cannot run here", plain(fit.cannot_run.line())))
    if fit.available is not None:
        if fit.margin_bytes:
            rows.append(("margin", f"{size(fit.margin_bytes)} beside the peak, which the limit counts as well"))
        rows.append(("fits", _fit_words(fit)))
    if isinstance(speed, Unknown):
        rows.append(("speed", f"not predicted: {plain(speed.why)}"))
    else:
        rows.append(("speed", f"{speed_words(speed)}, 90 % interval, by {plain(speed.basis)}"))
    if predicted.attention:
        rows.append(("attention", predicted.attention))
    rows.append(("basis", predicted.basis))
    print_lines(pairs(rows))
    if answer.asked.unpublished:
        print_line(answer.asked.unpublished)


def _fit_words(fit: PredictedFit) -> str:
    """Return by how much the batch fits or does not, and the largest batch that does."""
    assert fit.available is not None
    assert fit.left_bytes is not None
    limit = f"the {size(fit.available.limit_bytes)} {fit.available.words}"
    if fit.left_bytes >= 0:
        left = f"yes, {size(fit.left_bytes)} left of {limit}"
        return left if fit.max_batch is None else f"{left}; up to batch_size {count(fit.max_batch)}"
    most = f"up to batch_size {count(fit.max_batch)} fits" if fit.max_batch else "not even batch_size 1 fits"
    return f"no, {size(-fit.left_bytes)} too much for {limit}; {most}"


class _Table:
    """A row for each variant, in order, printed as soon as the rows before it are there."""

    def __init__(self, asked: list[RunToPredict]) -> None:
        self._names = [plain(one.id) for one in asked]
        self._without = () if any(one.published for one in asked) else PUBLISHED
        self._printed = 0
        self._table: GrowingTable | None = None

    def is_next(self, place: int) -> bool:
        """True if the answer at `place` is the next to print."""
        return place == self._printed

    def print_ready(self, found: Mapping[int, PredictedRow]) -> None:
        """Print all rows that are ready."""
        table = self._table = self._table or self._new_table()
        while self._printed in found:
            answer = found[self._printed]
            if answer.error is not None:
                table.add_note(self._names[self._printed], plain(answer.error.line()))
            else:
                table.add(_cells(answer))
            self._printed += 1

    def _new_table(self) -> GrowingTable:
        parts = list(map(short, CATEGORIES))
        header = ["variant", "predicted", "published", "difference", *parts, "peak in", "fits", "max batch"]
        name, phase = max(map(len, self._names)), max(map(len, PHASES.values()))
        widths = [name, SIZE, SIZE, DIFFERENCE, *[SIZE] * len(parts), phase, FITS, 0]
        right = (1, 2, 3, *range(4, 4 + len(parts)), 6 + len(parts))
        return GrowingTable(
            header, widths, right, drop=(*reversed(parts), "peak in", "difference"), without=self._without
        )


def _cells(answer: PredictedRow) -> list[str]:
    fit = answer.fit
    assert fit is not None
    predicted = fit.predicted
    fits = ABSENT if fit.left_bytes is None else "yes" if fit.left_bytes >= 0 else f"no, +{size(-fit.left_bytes)}"
    published = published_bytes(answer.asked.published)
    return [
        plain(answer.asked.id),
        size(predicted.total_bytes),
        ABSENT if published is None else size(published),
        delta(predicted.total_bytes, published, size) if published else ABSENT,
        *(size(value) if (value := predicted.category(name)) else ABSENT for name in CATEGORIES),
        PHASES.get(predicted.phase, predicted.phase),
        "not here" if fit.cannot_run is not None else fits,
        ABSENT if fit.max_batch is None else count(fit.max_batch),
    ]


def _print_notes(answers: list[PredictedRow]) -> None:
    for answer in answers:
        if answer.fit is not None and answer.fit.cannot_run is not None:
            print_line(plain(f"{answer.asked.id} cannot run here: {answer.fit.cannot_run.line()}"))
    if unpublished := next((one.asked.unpublished for one in answers if one.asked.unpublished), ""):
        print_line(unpublished)
    if any("memory_mb" in answer.asked.published for answer in answers):
        print_line("published memory_mb is NVML's figure for the device: it includes the CUDA context, kernels, memory")
        print_line("that the allocator keeps, and other processes; predicted is the peak of the tensors alone")
