"""Results of scripts whose steps differ in size, or that evaluate between their steps."""

import re

from own_scripts.conftest import run_script, samples_of_steps, written

START = """
import time, torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step(x):
    model(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_case_04_steps_that_differ_in_size_have_a_mean_over_time_and_no_median(cli, tmp_path):
    lines = """
sizes = [4, 4, 4, 64] * 4
ends = [sum(sizes[: n + 1]) for n in range(16)]
batches = [list(range(end - size, end)) for size, end in zip(sizes, ends)]
for x in DataLoader(torch.randn(sum(sizes), 8), batch_sampler=batches):
    time.sleep(0.02)
    step(x)
"""
    result = run_script(cli, *written(tmp_path, START + lines))
    assert samples_of_steps(cli, result) == {4, 64}
    rate = result["throughput"]["samples_per_s"]
    assert (rate["median"], rate["mad"]) == (None, None)
    steps_per_s = 1000 / 20
    assert 0 < rate["mean"] <= steps_per_s * (4 * 64 + 9 * 4) / 13
    assert rate["mean"] > 64, "the median of the steps' rates is at most 200, the mean may be at 1,100"
    assert re.search(r"throughput +[\d.,]+ samples/s \(mean: steps differ in size", cli("runs", "show", "last").out)
    assert cli("runs", "list", "--json").json["runs"][0]["samples_per_s"] == rate["mean"]
    compared = cli("runs", "compare", "last", "last", "--json").json
    assert rate["mean"] in compared["rows"][0].values()
    assert cli("report", "last", "-o", str(tmp_path / "report.md")).code == 0
    assert "mean: steps differ in size" in (tmp_path / "report.md").read_text()


def test_case_08_out_of_memory_in_an_evaluation_is_told_from_one_in_training(cli, tmp_path):
    lines = """
def evaluate():
    for (x,) in DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=8):
        with torch.no_grad(): model(x)
    raise MemoryError("Unable to allocate 512. MiB for an array with shape (2,) and data type float64")
for n in range(5): step(torch.randn(8, 8))
evaluate()
"""
    result = run_script(cli, *written(tmp_path, START + lines), code=3)
    assert (result["state"], result["error"]["phase"]) == ("oom", "evaluation")
    assert result["reason"].endswith("(step 5, phase evaluation)")
    oom = result["oom"]
    assert (oom["phase"], oom["asked_bytes"], oom["changes"]) == ("evaluation", 512 << 20, [])
    text = cli("runs", "show", "last").out
    for advice in ("evaluation batch", "eval_accumulation_steps", "preprocess_logits_for_metrics"):
        assert any(advice in line for line in oom["advice"])
        assert advice in text
