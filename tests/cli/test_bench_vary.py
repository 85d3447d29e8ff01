"""`bench --vary` for real: a grid of tiny trainings."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.command import SMALL, Cli

pytestmark = pytest.mark.xdist_group("trainings-of-the-command-line")


@pytest.mark.long
def test_a_grid_that_is_refused_in_part_has_those_rows_with_their_reason(cli: Cli, tmp_path: Path) -> None:
    page = tmp_path / "table.html"
    grid = ("--vary", "batch_size=2,4", "--vary", "strategy=single,dp")
    done = cli("bench", "tiny-llama", *SMALL, "--set", "steps=6", *grid, "--repeat", "2", "-o", str(page), "--json")
    assert done.code == 0, done.err
    rows = {row["id"]: row for row in done.json["rows"]}
    assert {id: row["state"] for id, row in rows.items()} == {
        "batch_size=2 strategy=single": "finished",
        "batch_size=2 strategy=dp": "refused",
        "batch_size=4 strategy=single": "finished",
        "batch_size=4 strategy=dp": "refused",
    }
    baseline, larger = rows["batch_size=2 strategy=single"], rows["batch_size=4 strategy=single"]
    assert done.json["baseline"] == baseline["id"]
    assert [len(row["samples_per_s"]) for row in (baseline, larger)] == [2, 2]
    assert larger["result"]["knobs"]["batch_size"] == larger["knobs"]["batch_size"] == 4
    assert larger["vs_baseline_percent"] == pytest.approx(
        100 * (sum(larger["samples_per_s"]) / sum(baseline["samples_per_s"]) - 1)
    )
    assert "GPU" in rows["batch_size=2 strategy=dp"]["reason"]
    assert '<td class="text">batch_size=4 strategy=single</td>' in page.read_text()


def test_a_grid_that_cannot_be_asked_for_is_refused_at_once(cli: Cli) -> None:
    sizes = ",".join(map(str, range(1, 1001)))
    million = cli("bench", "tiny-llama", "--vary", f"batch_size={sizes}", "--vary", f"grad_accum={sizes}").refused()
    assert "1,000,000 rows" in million
    assert "dropping --vary batch_size and --vary grad_accum" in million
    assert "did you mean workers?" in cli("bench", "tiny-llama", "--vary", "worker=1,2").refused()
    assert "given twice" in cli("bench", "tiny-llama", "--vary", "workers=1", "--vary", "workers=2").refused()
    assert "did you mean .csv?" in cli("bench", "tiny-llama", "--vary", "workers=1", "-o", "table.cvs").refused()
