"""The cost of one frame of a chart: ours beside Textual's Sparkline, both repainted at 10 Hz in a pseudo-terminal.

    python -m benchmarks.chart [--seconds 8] [--rate 10] [--json]

CPU a frame is the app's whole cost (drawing, layout, output) less that of the same app with an empty screen.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path

from benchmarks.pty_meter import measure
from rich.style import Style
from textual.app import ComposeResult
from textual.widget import Widget
from textual.widgets import Sparkline

from trainfast_tui.charts.chart_data import ChartData, Limit, Series, ThrottledSpan
from trainfast_tui.charts.paint import paint
from trainfast_tui.charts.strip_chart import StripChart
from trainfast_tui.charts.time_axis import TimeAxis
from trainfast_tui.charts.y_range import YRange
from trainfast_tui.painting.palettes import TONES
from trainfast_tui.terminal.textual_app import TerminalApp
from trainfast_tui.text.format import watts

WIDTH, HEIGHT, POINTS = 120, 16, 600
SECOND_NS = 1_000_000_000
PLAIN = "-plain"
"""The ending of a subject that Textual sends by itself: a changed region whole, not its changed cells."""


def chart_at(point: int) -> ChartData:
    """Two series of 600 points at 5 Hz from point number `point` on; noisy, as power and clocks are."""
    step_ns = SECOND_NS // 5
    indexes = range(point, point + POINTS)
    times_ns = [index * step_ns for index in indexes]
    first = [250 + 60 * math.sin(i / 25) + 40 * math.sin(i * i % 97) for i in indexes]
    second = [120 + 40 * math.sin(i / 40 + 1) + 15 * math.sin(i * i % 89) for i in indexes]
    return ChartData(
        title="Power",
        series=(Series("GPU 0", times_ns, first), Series("GPU 1", times_ns, second, "secondary")),
        axis=TimeAxis(times_ns[0], times_ns[-1], is_live=True),
        gap_ns=2 * SECOND_NS,
        format_value=watts,
        spans=(ThrottledSpan(times_ns[200], times_ns[260], "thermal"),),
        limit=Limit(400, "limit"),
    )


class Painted(TerminalApp):
    """Repaints one widget at `rate` Hz, or nothing at all, with the product's own output to the terminal."""

    CSS = f"Screen {{ overflow: hidden; }} StripChart, Sparkline {{ width: {WIDTH}; height: {HEIGHT}; }}"

    def __init__(self, subject: str, rate: float) -> None:
        super().__init__(plain_output=subject.endswith(PLAIN))
        self._subject = subject.removesuffix(PLAIN)
        self._rate = rate
        self._ticks = count()

    def compose(self) -> ComposeResult:
        if self._subject.startswith("chart"):
            yield StripChart()
        elif self._subject == "sparkline":
            yield Sparkline(chart_at(0).series[0].values)  # type: ignore[arg-type]
        else:
            yield Widget()

    def on_mount(self) -> None:
        self.set_interval(1 / self._rate, self._repaint)

    def _repaint(self) -> None:
        tick = next(self._ticks)
        if self._subject == "chart":
            # Six points are one cell of this window: every frame is another picture.
            self.query_one(StripChart).show_chart(chart_at(6 * tick))
        elif self._subject == "chart-newest":
            # One new point a frame, as in a live run: five frames of six change the last cell alone.
            self.query_one(StripChart).show_chart(chart_at(tick))
        elif self._subject == "sparkline":
            self.query_one(Sparkline).data = chart_at(tick).series[0].values  # type: ignore[assignment]
        else:
            chart_at(tick)


SUBJECTS = {
    "idle": "empty screen",
    "chart": "StripChart, all new",
    "chart-newest": "StripChart, live",
    "chart-newest-plain": "the same by Textual itself",
    "sparkline": "Sparkline (one series)",
}


def drawing_ms() -> float:
    """The median time to draw one frame of ours, without Textual's part, in milliseconds."""
    palette: dict[str, Style] = {name: Style(color="blue") for name in TONES}
    y_range = YRange()
    took = []
    for tick in range(100):
        data = chart_at(tick)
        start = time.perf_counter()
        paint(data, WIDTH, HEIGHT, y_range, palette)
        took.append((time.perf_counter() - start) * 1e3)
    return statistics.median(took)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Measure what one frame of a chart costs.")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rate", type=float, default=10.0, help="repaints a second (default 10)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--subject", choices=list(SUBJECTS), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.subject:
        Painted(options.subject, options.rate).run()
        return 0
    measured = {
        subject: measure(
            [sys.executable, "-m", "benchmarks.chart", "--subject", subject, "--rate", str(options.rate)],
            seconds=options.seconds,
            paint_timeout=2.0,
            cwd=Path(__file__).parents[1],
        )
        for subject in SUBJECTS
    }
    idle = measured["idle"]
    rows = {
        subject: {
            "cpu_ms_per_frame": (result.cpu_percent - idle.cpu_percent) * 10 / options.rate,
            "bytes_per_frame": result.bytes_per_s / options.rate,
            "largest_frame_bytes": result.largest_frame_bytes,
        }
        for subject, result in measured.items()
        if subject != "idle"
    }
    drawing = drawing_ms()
    if options.json:
        print(json.dumps({"drawing_ms": drawing, "rows": rows, "runs": {k: asdict(m) for k, m in measured.items()}}))
        return 0
    print(f"{WIDTH}x{HEIGHT}, {POINTS} points a series, {options.rate:g} Hz for {options.seconds:g} s each\n")
    print(f"{'':24}{'CPU a frame':>14}{'bytes a frame':>16}{'largest frame':>16}")
    for subject, row in rows.items():
        print(
            f"{SUBJECTS[subject]:24}{row['cpu_ms_per_frame']:11.2f} ms{row['bytes_per_frame'] / 1e3:13.2f} kB"
            f"{row['largest_frame_bytes'] / 1e3:13.2f} kB"
        )
    print(f"\ndrawing alone (two series, no Textual): {drawing:.2f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
