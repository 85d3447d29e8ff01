"""The table of a bench as Markdown: ours and the published figures side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainfast_runner.results.bottleneck.doubts import marks
from trainfast_runner.results.comparison.difference import NOISE
from trainfast_runner.search.bench.variants import Bench, Row, Table
from trainfast_runner.settings.knobs import BY_NAME

MEASURED = ("samples/s", "vs baseline", "95 % CI", "step ms", "peak MiB", "TFLOP/s", "notebook's TFLOP/s")
ALWAYS = ("batch_size", "seq_len", "precision", "strategy")
"""Settings shown for the baseline; other rows show the settings that differ."""


def markdown(bench: Bench, table: Table, command: str) -> str:
    """Return a heading, the command that makes the table again, the table, and notes for the reader."""
    published = list(dict.fromkeys(key for row in table.rows for key in row.published))
    shown = [place for place in range(len(MEASURED)) if any(measured(row)[place] for row in table.rows)]
    header = ["variant", "settings", *(MEASURED[place] for place in shown)]
    gains = [published_gain(row) for row in table.rows]
    header += [*(f"published {key}" for key in published), *(["published vs baseline"] if any(gains) else [])]
    header += [*(["ours / published"] if published else []), "state"]
    lines = [f"# {_cell(bench.title)}", "", f"`{command}`", "", _line(header)]
    # Text to the left, figures to the right.
    lines.append(_line(["---", "---", *["---:"] * (len(header) - 3), "---"]))
    specs = {entry.id: entry.spec for entry in bench.entries}
    common = specs[bench.baseline]
    for row, gain in zip(table.rows, gains, strict=True):
        mine = specs[row.id]
        is_baseline = row.id == bench.baseline
        names = ALWAYS if is_baseline else [name for name in BY_NAME if mine.knobs[name] != common.knobs[name]]
        settings = [f"{name}={BY_NAME[name].show(mine.knobs[name])}" for name in names]
        cells = [
            _cell(row.id) + (" (baseline)" if is_baseline else ""),
            _cell(" ".join([*_other_fields("model", mine.model, common.model), *settings])),
            *(measured(row)[place] for place in shown),
            *(_cell(str(row.published.get(key, ""))) for key in published),
            *([gain] if any(gains) else []),
            *(["" if row.ratio is None else f"{row.ratio:.3g}"] if published else []),
            _state(row),
        ]
        lines.append(_line(cells))
    return "\n".join([*lines, "", *notes(table), ""])


def published_gain(row: Row) -> str:
    """The source's gain over its own baseline, which unlike its figures compares across machines."""
    gain = row.published_vs_baseline_percent
    return "" if gain is None else f"{gain:+.1f} %"


def _other_fields(section: str, mine: Mapping[str, Any], common: Mapping[str, Any]) -> list[str]:
    """The fields of a row's model that differ from the baseline's."""
    return [f"{section}.{name}={value}" for name, value in mine.items() if common.get(name) != value]


def measured(row: Row) -> list[str]:
    """The cells of `MEASURED`, empty when there is no reading."""
    result = row.result
    if result is None or not row.samples_per_s:
        return [""] * len(MEASURED)
    percent = "" if row.vs_baseline_percent is None else f"{row.vs_baseline_percent:+.1f} %"
    if row.verdict == NOISE:
        percent += " (noise)"
    peak = result.memory.device_peak_used_bytes or result.memory.peak_allocated_bytes
    rate = sorted(row.samples_per_s)
    middle = (rate[(len(rate) - 1) // 2] + rate[len(rate) // 2]) / 2
    return [
        f"{middle:.4g}",
        percent,
        "" if row.interval_percent is None else "{:+.1f} to {:+.1f} %".format(*row.interval_percent),
        "" if result.step_ms.p50 is None else f"{result.step_ms.p50:.4g}",
        "" if peak is None else f"{peak / 2**20:,.0f}",
        _figure(result.flops.model_tflops_per_device),
        _figure(result.flops.notebook_tflops_per_device),
    ]


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _state(row: Row) -> str:
    if row.state == "finished":
        return ", ".join(["finished", *(marks(row.result) if row.result is not None else ())])
    return f"{row.state.replace('_', ' ')}: {_cell(row.reason)}"


def notes(table: Table) -> Iterator[str]:
    """Yield the notes for the reader of the table, a sentence each."""
    results = [row.result for row in table.rows if row.result is not None]
    if any(row.published for row in table.rows):
        yield "Published figures were measured on other hardware and software; they are facts to compare with."
    if table.unpublished:
        yield table.unpublished
    if any(result.memory.device_peak_used_bytes is None for result in results):
        yield "Peak MiB is the worst rank's allocations; no device memory could be read."
    if any(result.synthetic_data for result in results):
        yield "Some rows trained on synthetic data: their losses say nothing."
    if any(not result.conditions.clean for result in results):
        yield "Some runs did not start under clean conditions; see `trainfast-tui runs show`."


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(text: str) -> str:
    """Text that cannot end a cell or a line of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")
