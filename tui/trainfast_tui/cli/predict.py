"""`predict`: the memory of a run by category and its speed, without running it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from trainfast_runner.memory import headroom
from trainfast_runner.memory.tracing import TraceProgress
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_file import SCHEMA, PredictedSpeed
from trainfast_runner.search.predicted_speed import UnknownSpeed, predict_speed
from trainfast_tui.cli.arguments import add_settings
from trainfast_tui.cli.printing import print_json, print_line, print_lines, print_notice, print_table
from trainfast_tui.cli.progress import progress_when_slow
from trainfast_tui.text import format as fmt
from trainfast_tui.text.event_words import importing_words
from trainfast_tui.text.memory_words import CATEGORY_WORDS, phase_words, short_category
from trainfast_tui.text.next_run_words import speed_text

TRACING_WORDS = "tracing a step without memory"


def predict_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("preset", metavar="PRESET", help="a preset, each of its variants a row, or NAME/VARIANT")
    add_settings(parser)
    parser.add_argument("--python", metavar="PATH", help="the Python that would train, whatever torch it has")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print {predicted, phase, fits, max_batch, samples_per_s, seconds} or {rows}",
    )


def predict(arguments: argparse.Namespace) -> int:
    """Print the prediction and return 0, even if some of several rows have an error.

    Raises UserError if the only run has one. Return 3 if `memory_limit` is below the parameters' own memory.
    """
    began_s = time.monotonic()
    runs = headroom.runs_to_predict(arguments.preset, arguments.settings)
    rows = _predict(runs, arguments.python)
    if len(rows) == 1 and rows[0].error is not None:
        raise rows[0].error
    if arguments.json:
        fields_of_rows = [_fields(row, _speed(row, arguments.python)) for row in rows]
        fields = {"rows": fields_of_rows} if len(runs) > 1 else fields_of_rows[0]
        seconds = round(time.monotonic() - began_s, 3)
        print_json({"schema": SCHEMA, "preset": arguments.preset, **fields, "seconds": seconds})
    elif len(runs) > 1:
        print_rows(rows)
    else:
        print_lines(fmt.pair_lines(_figure_rows(rows[0], _speed(rows[0], arguments.python))))
        if rows[0].run.unpublished:
            print_line(rows[0].run.unpublished)
    if len(rows) > 1 or (limit_error := rows[0].limit_error) is None:
        return 0
    print_notice(f"trainfast-tui: {limit_error.line()}")
    return limit_error.exit_code


def _predict(runs: list[headroom.RunToPredict], python: str | None) -> list[headroom.PredictedRow]:
    """Return the prediction of each run, with progress on stderr."""

    def show_tracing(tracing: TraceProgress) -> None:
        if tracing.importing:
            update(importing_words(tracing.importing))
        elif tracing.done < tracing.total:
            update(f"{TRACING_WORDS}, {tracing.done + 1} of {tracing.total}", tracing.done / tracing.total)

    with progress_when_slow(f"{TRACING_WORDS}…", on_any_stream=len(runs) > 1) as update:
        rows = dict(headroom.predict_rows(runs, python, show_tracing))
    return [rows[index] for index in range(len(runs))]


def _speed(row: headroom.PredictedRow, python: str | None) -> PredictedSpeed | UnknownSpeed:
    """Return the run's predicted speed, or why there is none."""
    if row.model is None or row.machine is None:
        return UnknownSpeed("its memory is not predicted")
    return predict_speed(Home(), row.run.spec, row.machine, row.model, python)


def _fields(row: headroom.PredictedRow, speed: PredictedSpeed | UnknownSpeed) -> dict[str, Any]:
    fit = row.fit
    if fit is None:
        assert row.error is not None
        return {"id": row.run.id, "predicted": None, "reason": row.error.line()}
    predicted, available = fit.predicted, fit.available
    parts = {f"{name}_bytes": predicted.category(name) for name in CATEGORY_WORDS}
    return {
        "id": row.run.id,
        "predicted": {"total_bytes": predicted.total_bytes, **parts, "context_bytes": predicted.context_bytes},
        "phase": predicted.phase,
        "phases": predicted.phases,
        "fits": fit.fits,
        "needed_bytes": fit.needed_bytes,
        "margin_bytes": fit.margin_bytes,
        "limit_bytes": None if available is None else available.size_bytes,
        "max_batch": fit.max_batch,
        "cannot_run": None if fit.refusal is None else fit.refusal.line(),
        "fullest": predicted.fullest or None,
        "basis": predicted.basis,
        "attention": predicted.attention or None,
        "samples_per_s": None if isinstance(speed, UnknownSpeed) else msgspec.to_builtins(speed),
        **({"why": speed.reason} if isinstance(speed, UnknownSpeed) else {}),
        "published": dict(row.run.published) or None,
        "unpublished": row.run.unpublished or None,
    }


def _figure_rows(row: headroom.PredictedRow, speed: PredictedSpeed | UnknownSpeed) -> Iterator[tuple[str, str]]:
    """Yield labels and figures of one predicted run."""
    fit = row.fit
    assert fit is not None
    predicted = fit.predicted
    yield "peak memory", f"{fmt.size(predicted.total_bytes)} a rank, in {phase_words(predicted.phase)}"
    if predicted.fullest:
        yield "fullest", predicted.fullest
    for name, words in CATEGORY_WORDS.items():
        if value := predicted.category(name):
            yield f"  {words}", f"{fmt.size(value)}  {fmt.percent(100 * value / predicted.total_bytes)}"
    if predicted.context_bytes is not None:
        yield "CUDA context", f"{fmt.size(predicted.context_bytes)} besides"
    if (published := headroom.published_bytes(row.run.published)) is not None:
        yield "published", fmt.size(published)
    if predicted.bytes_per_sample:
        yield "each sample", f"{fmt.size(predicted.bytes_per_sample)} on {fmt.size(predicted.fixed_bytes)}"
    if fit.refusal is not None:
        yield "cannot run here", fit.refusal.line()
    if fit.available is not None:
        if fit.margin_bytes:
            yield "margin", f"{fmt.size(fit.margin_bytes)} beside the peak, which the limit counts as well"
        yield "fits", _fit_words(fit)
    if isinstance(speed, UnknownSpeed):
        yield "speed", f"not predicted: {speed.reason}"
    else:
        yield "speed", f"{speed_text(speed)}, 90 % interval, by {speed.basis}"
    if predicted.attention:
        yield "attention", predicted.attention
    yield "basis", predicted.basis


def _fit_words(fit: headroom.PredictedFit) -> str:
    """Return by how much the batch fits or does not, and the largest batch that does."""
    assert fit.available is not None
    assert fit.left_bytes is not None
    limit = f"the {fmt.size(fit.available.size_bytes)} {fit.available.source}"
    if fit.left_bytes >= 0:
        words = f"yes, {fmt.size(fit.left_bytes)} left of {limit}"
        return words if fit.max_batch is None else f"{words}; up to batch_size {fmt.count(fit.max_batch)}"
    batches = f"up to batch_size {fmt.count(fit.max_batch)} fits" if fit.max_batch else "not even batch_size 1 fits"
    return f"no, {fmt.size(-fit.left_bytes)} too much for {limit}; {batches}"


def print_rows(rows: list[headroom.PredictedRow]) -> None:
    """Print a row for each variant that is predicted, then the others with their reasons, and the notes."""
    parts = fmt.figure_headings(*map(short_category, CATEGORY_WORDS))
    header = ["variant", *fmt.figure_headings("predicted", "published", "difference"), *parts]
    header += ["peak in", "fits", fmt.FigureHeading("max batch")]
    cells = [_cells(row) for row in rows if row.fit is not None]
    if cells:
        filled_header, filled_cells = fmt.without_empty_columns(header, cells, empty=fmt.ABSENT)
        print_table(filled_header, filled_cells, drop=(*reversed(parts), "peak in", "difference"))
    for row in rows:
        if row.error is not None:
            print_line(f"{row.run.id}: {row.error.line()}")
        elif row.fit is not None and row.fit.refusal is not None:
            print_line(f"{row.run.id} cannot run here: {row.fit.refusal.line()}")
    if unpublished := next((row.run.unpublished for row in rows if row.run.unpublished), ""):
        print_line(unpublished)
    if any("memory_mb" in row.run.published for row in rows):
        print_line("published memory_mb is NVML's figure for the device: it includes the CUDA context, kernels, memory")
        print_line("that the allocator keeps, and other processes; predicted is the peak of the tensors alone")


def _cells(row: headroom.PredictedRow) -> list[str]:
    fit = row.fit
    assert fit is not None
    predicted = fit.predicted
    left_bytes = fit.left_bytes
    fits = fmt.ABSENT if left_bytes is None else "yes" if left_bytes >= 0 else f"no, +{fmt.size(-left_bytes)}"
    published = headroom.published_bytes(row.run.published)
    return [
        row.run.id,
        fmt.size(predicted.total_bytes),
        fmt.ABSENT if published is None else fmt.size(published),
        fmt.signed_percent(fmt.percent_change(predicted.total_bytes, published)),
        *(fmt.size(value) if (value := predicted.category(name)) else fmt.ABSENT for name in CATEGORY_WORDS),
        phase_words(predicted.phase),
        "not here" if fit.refusal is not None else fits,
        fmt.ABSENT if fit.max_batch is None else fmt.count(fit.max_batch),
    ]
