"""The table of a bench as text cells: measured and published figures side by side."""

from __future__ import annotations

from collections.abc import Iterator

from trainfast_runner.records.run_states import state_text
from trainfast_runner.results.bottleneck.doubts import doubt_marks
from trainfast_runner.results.comparison.difference import NOISE
from trainfast_runner.search.bench.table import Row, Table
from trainfast_runner.search.bench.variants import Bench
from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_runner.settings.spec import RunSpec

FIGURE_COLUMNS = ("samples/s", "vs baseline", "95 % CI", "step ms", "peak MiB", "TFLOP/s", "notebook's TFLOP/s")
"""Headings of the columns of figures, after those of the settings."""
BASELINE_SETTINGS = ("batch_size", "seq_len", "precision", "strategy")
"""Settings shown for the baseline; other rows show the settings that differ."""


def bench_columns(bench: Bench, table: Table) -> dict[str, list[str]]:
    """Return the columns as text by heading; no figure's column is empty."""
    specs = {planned.id: planned.spec for planned in bench.rows}
    rows = table.rows
    figures = {name: [_figure_cells(row)[index] for row in rows] for index, name in enumerate(FIGURE_COLUMNS)}
    for key in dict.fromkeys(key for row in rows for key in row.published):
        figures[f"published {key}"] = [str(row.published.get(key, "")) for row in rows]
    figures["published vs baseline"] = [_published_gain(row) for row in rows]
    figures["ours / published"] = ["" if row.ratio is None else f"{row.ratio:.3g}" for row in rows]
    return {
        "variant": [row.id + (" (baseline)" if row.id == bench.baseline_id else "") for row in rows],
        "settings": [" ".join(_settings(bench, specs[row.id], specs[bench.baseline_id])) for row in rows],
        **{heading: cells for heading, cells in figures.items() if any(cells)},
        "process": [process_word(row) for row in rows],
        "state": [_state(row) for row in rows],
    }


def _settings(bench: Bench, row_spec: RunSpec, baseline: RunSpec) -> Iterator[str]:
    """Yield the settings of a row that differ from the baseline's, as `name=value`, without those of its id."""
    yield from (f"model.{name}={value}" for name, value in row_spec.model.items() if baseline.model.get(name) != value)
    # A script's row has only the knobs that were asked for.
    set_knobs = [name for name in KNOBS_BY_NAME if name in row_spec.knobs]
    differing_knobs = [name for name in set_knobs if row_spec.knobs[name] != baseline.knobs.get(name)]
    names = BASELINE_SETTINGS if row_spec is baseline else differing_knobs
    yield from (
        f"{name}={KNOBS_BY_NAME[name].text_of(row_spec.knobs[name])}"
        for name in names
        if name in row_spec.knobs and name not in bench.varied
    )


def _published_gain(row: Row) -> str:
    """Return the published gain over the published baseline: it is comparable across machines, the figures are not."""
    gain = row.published_vs_baseline_percent
    return "" if gain is None else f"{gain:+.1f} %"


def _figure_cells(row: Row) -> list[str]:
    """Return the cells of `FIGURE_COLUMNS`, empty when there is no reading."""
    result = row.result
    if result is None or not row.samples_per_s:
        return [""] * len(FIGURE_COLUMNS)
    percent = "" if row.vs_baseline_percent is None else f"{row.vs_baseline_percent:+.1f} %"
    if row.verdict == NOISE:
        percent += " (noise)"
    return [
        _figure(row.rate, 4),
        percent,
        "" if row.interval_percent is None else "{:+.1f} to {:+.1f} %".format(*row.interval_percent),
        _figure(result.step_ms.p50, 4),
        "" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:,.0f}",
        _figure(result.flops.model_tflops_per_device),
        _figure(result.flops.notebook_tflops_per_device),
    ]


def process_word(row: Row) -> str:
    """Return `warm` for a row that shared its process with others, `cold` for one of its own, else empty."""
    return {None: "", True: "warm", False: "cold"}[row.warm]


def _figure(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}g}"


def _state(row: Row) -> str:
    if row.state == "finished":
        return ", ".join(["finished", *(doubt_marks(row.result) if row.result is not None else ())])
    return f"{state_text(row.state)}: {row.reason}"


def table_notes(table: Table) -> Iterator[str]:
    """Yield the notes for the reader of the table, one sentence at a time."""
    results = [row.result for row in table.rows if row.result is not None]
    if any(row.published for row in table.rows):
        yield "Published figures were measured on other hardware and software; they are facts to compare with."
    if table.unpublished:
        yield table.unpublished
    if any(result.memory.device_peak_used_bytes is None for result in results):
        yield "Peak MiB is the worst rank's allocations; no device memory could be read."
    if any(result.synthetic_data for result in results):
        yield "Some rows trained on synthetic data: their losses say nothing."
    if any(row.warm for row in table.rows):
        yield "Warm rows trained one after another in one process; --cold gives every row a process of its own."
    if any(not result.conditions.clean for result in results):
        yield "Some runs started before their device had freed the last run's memory; see `trainfast-tui runs show`."
