"""`bench --vary` for real: a grid of tiny trainings."""

import pytest

from cli.command import SMALL

pytestmark = pytest.mark.xdist_group("trainings-of-the-command-line")


TINY = ("bench", "tiny-llama", *SMALL, "--set", "steps=6", "--json")


@pytest.mark.long
def test_rows_are_runs_of_their_own_and_a_refused_one_keeps_its_reason(cli, tmp_path):
    page = tmp_path / "table.html"
    done = cli(*TINY, "--vary", "batch_size=2,4", "--vary", "strategy=single,dp", "--repeat", "2", "-o", str(page))
    assert done.code == 0, done.err
    assert done.json["baseline"] == "batch_size=2 strategy=single"
    one, refused, two, also_refused = done.json["rows"]
    assert [(row["state"], "GPU" in row["reason"]) for row in (refused, also_refused)] == [("refused", True)] * 2
    assert [(row["state"], len(row["samples_per_s"])) for row in (one, two)] == [("finished", 2)] * 2
    assert len(cli("runs", "list", "--json").json["runs"]) == 4
    median = [sum(row["samples_per_s"]) / 2 for row in (one, two)]
    assert two["vs_baseline_percent"] == pytest.approx(100 * (median[1] / median[0] - 1))
    assert "<td>batch_size=4 strategy=single</td>" in page.read_text()
