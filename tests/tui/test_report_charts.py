"""The charts of a report are about the GPUs of its run."""

from __future__ import annotations

import msgspec
from recorded import a_run

from trainfast_runner.records.home import Home
from trainfast_runner.records.run_directory import read_result
from trainfast_tui.report.reported_run import read_run
from trainfast_tui.report.run_charts import charts_of


def test_a_gpu_that_the_run_never_used_shades_no_chart(home: Home) -> None:
    directory = a_run(home, gpus=4)
    run = msgspec.json.decode((directory / "run.json").read_bytes())
    # GPU 1 is at its power limit, GPU 3 is throttled by heat.
    (directory / "run.json").write_bytes(msgspec.json.encode({**run, "device_uuids": ["GPU-00000000"]}))
    result = read_result(directory)
    assert result is not None
    charts = charts_of(read_run("A", directory, result))
    assert {chart.title: chart.spans for chart in charts if chart.spans} == {}
