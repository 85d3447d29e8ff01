"""Speed of each run: the samples/s predicted before its launch, beside those measured."""

from __future__ import annotations

from collections.abc import Sequence

from trainfast_runner.records.run_file import PredictedSpeed
from trainfast_tui.report.blocks import Block, Heading, as_blocks, filled_grid
from trainfast_tui.report.pictures import Whisker, whisker_picture
from trainfast_tui.report.reported_run import ReportedRun
from trainfast_tui.text.format import ABSENT, interval, number, percent_change, signed_percent
from trainfast_tui.text.tables import figure_headings

FIGURES = figure_headings("predicted samples/s", "90 % interval", "measured", "difference")
HEADER = ("", *FIGURES, "in the interval", "predicted from")


def speed_blocks(runs: Sequence[ReportedRun]) -> list[Block]:
    """Return the table and the intervals of the runs whose speed was predicted; empty if none was."""
    speeds = [(run, run.result.throughput.predicted) for run in runs]
    predicted = [(run, speed) for run, speed in speeds if speed is not None]
    if not predicted:
        return []
    whiskers = [whisker for run, speed in predicted for whisker in _whiskers(run, speed)]
    picture = whisker_picture("speed predicted and measured", "samples/s, the 90 % interval", whiskers, number)
    table = filled_grid(HEADER, [_row(run, speed) for run, speed in predicted])
    return [Heading("Speed predicted and measured"), table, *as_blocks(picture)]


def _row(run: ReportedRun, speed: PredictedSpeed) -> list[str]:
    measured = run.result.throughput.samples_per_s.typical
    difference = signed_percent(percent_change(measured, speed.median))
    inside_word = ABSENT if measured is None else "yes" if speed.low <= measured <= speed.high else "no"
    ends = interval(speed.low, speed.high)
    return [run.label, number(speed.median), ends, number(measured), difference, inside_word, speed.basis]


def _whiskers(run: ReportedRun, speed: PredictedSpeed) -> list[Whisker]:
    words = f"{number(speed.median)} predicted"
    whiskers = [Whisker(f"run {run.label}: predicted", speed.low, speed.median, speed.high, words, "muted")]
    measured = run.result.throughput.samples_per_s.typical
    if measured is not None:
        words = f"{number(measured)} measured"
        whiskers.append(Whisker(f"run {run.label}: measured", measured, measured, measured, words, "success"))
    return whiskers
