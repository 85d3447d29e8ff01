"""The table of a bench as text cells: measured and published figures side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from trainfast_runner.records.result import Result
from trainfast_runner.records.run_states import state_text
from trainfast_runner.results.comparison.difference import DOUBTFUL, NOISE
from trainfast_runner.results.doubts import doubts
from trainfast_runner.search.bench.table import Row, Table
from trainfast_runner.search.bench.variants import Bench
from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_runner.settings.spec import RunSpec
from trainfast_tui.text import format as fmt
from trainfast_tui.text.signs import DOUBT_SIGN, doubt_words
from trainfast_tui.text.tables import FigureHeading

BASELINE_SETTINGS = ("batch_size", "seq_len", "precision", "strategy")
"""Settings shown for the baseline; other rows show the settings that differ."""


def bench_columns(bench: Bench, table: Table) -> dict[str, list[str]]:
    """Return the columns as text by heading; the column of a figure that no row has is empty."""
    specs = {planned.id: planned.spec for planned in bench.rows}
    rows = table.rows
    published_names = dict.fromkeys(name for row in rows for name in row.published)
    return {
        "variant": [row.id + (" (baseline)" if row.id == bench.baseline_id else "") for row in rows],
        "settings": [" ".join(_settings(bench, specs[row.id], specs[bench.baseline_id])) for row in rows],
        **{
            FigureHeading(heading): [_figure_cell(row, cell_of) for row in rows]
            for heading, cell_of in FIGURE_CELLS.items()
        },
        **{
            FigureHeading(f"published {name}"): [str(row.published.get(name, "")) for row in rows]
            for name in published_names
        },
        FigureHeading("published vs baseline"): [_published_gain(row) for row in rows],
        FigureHeading("ours / published"): [_figure(row.ratio) for row in rows],
        "diagnosis": [row.diagnosis or "" for row in rows],
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
    return "" if gain is None else fmt.signed_percent(gain)


def _figure_cell(row: Row, cell_of: Callable[[Row, Result], str]) -> str:
    return "" if row.result is None or not row.samples_per_s else cell_of(row, row.result)


def _measured_gain(row: Row) -> str:
    gain = "" if row.vs_baseline_percent is None else fmt.signed_percent(row.vs_baseline_percent)
    remark = {NOISE: " (noise)", DOUBTFUL: f" {DOUBT_SIGN}"}.get(row.verdict or "", "")
    return f"{gain}{remark}" if gain else ""


def process_word(row: Row) -> str:
    """Return `warm` for a row that shared its process with others, `cold` for one of its own, else empty."""
    return {None: "", True: "warm", False: "cold"}[row.warm]


def _figure(value: float | None) -> str:
    return "" if value is None else fmt.number(value)


FIGURE_CELLS: dict[str, Callable[[Row, Result], str]] = {
    "samples/s": lambda row, result: _figure(row.rate),
    "vs baseline": lambda row, result: _measured_gain(row),
    "95 % CI": lambda row, result: "" if row.interval_percent is None else fmt.signed_interval(*row.interval_percent),
    "step ms": lambda row, result: _figure(result.step_ms.p50),
    "peak MiB": lambda row, result: "" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:,.0f}",
    "TFLOP/s": lambda row, result: _figure(result.flops.model_tflops_per_device),
    "notebook's TFLOP/s": lambda row, result: _figure(result.flops.notebook_tflops_per_device),
}
"""The cell of each measured figure by its heading; empty for an absent reading."""


def _state(row: Row) -> str:
    if row.state == "finished":
        return " ".join(filter(None, ("finished", doubt_words(doubts(row.result) if row.result is not None else ()))))
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
