"""Memory against throughput of several runs: the picture of those that compare with the first one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainfast_runner.results.comparison.ranking import speeds_rank
from trainfast_runner.results.pareto import pareto_front
from trainfast_tui.report.blocks import Block, Heading, as_blocks
from trainfast_tui.report.pictures import BEHIND_FRONT, ON_FRONT, Axis, PicturePoint, scatter_picture
from trainfast_tui.report.reported_run import ReportedRun
from trainfast_tui.text.format import number, size


def runs_pareto_blocks(runs: Sequence[ReportedRun]) -> list[Block]:
    """Return the picture; empty below two runs that compare in throughput and have a measured peak."""
    comparable = list(_comparable(runs))
    if len(comparable) < 2:
        return []
    # Of equal runs `pareto_front` keeps one, and none is beaten.
    front = {comparable[index][1:] for index in pareto_front([(peak, rate) for _, peak, rate in comparable])}
    points = [
        PicturePoint(
            peak,
            rate,
            ON_FRONT if (peak, rate) in front else BEHIND_FRONT,
            f"run {label}: {number(rate)} samples/s with {size(peak)}",
        )
        for label, peak, rate in comparable
    ]
    title, x_axis = "throughput by peak memory of each run", Axis("peak memory, a rank", size, binary=True)
    picture = scatter_picture(title, points, [], x_axis, Axis("samples/s", number))
    return [Heading("Memory against throughput"), *as_blocks(picture)]


def _comparable(runs: Sequence[ReportedRun]) -> Iterator[tuple[str, int, float]]:
    """Yield label, peak bytes and samples/s of the runs whose samples are as much work as those of the first."""
    first = runs[0]
    for run in runs:
        peak, rate = run.result.memory.peak_allocated_bytes, run.result.throughput.samples_per_s.typical
        compares = _sample_work(run) == _sample_work(first) and speeds_rank(first.result, run.result)
        if peak is not None and rate is not None and compares:
            yield run.label, peak, rate


def _sample_work(run: ReportedRun) -> tuple[object, ...]:
    """Return the settings that decide a sample's work: model, data and length; for a script its name and folder."""
    run_file = run.run_file
    model: tuple[object, object] = (run.result.name, "")
    if run_file is not None:
        model = (run_file.name, run_file.cwd) if run_file.script is not None else (run_file.model, run_file.data)
    return *model, run.result.knobs.get("seq_len")
