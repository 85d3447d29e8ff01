"""The cost of one frame of a chart: ours beside Textual's Sparkline, both repainted at 10 Hz in a pseudo-terminal.

    python -m benchmarks.chart [--seconds 8]

CPU a frame is the app's whole cost (drawing, layout, output) less that of the same app with an empty screen.
"""

import math
import sys
from itertools import count
from pathlib import Path

from benchmarks.meter import measure, options, print_columns
from textual.app import ComposeResult
from textual.widget import Widget
from textual.widgets import Label, Sparkline

from trainfast_tui.charts.chart_data import ChartData, Limit, Series, ThrottledSpan, TimeAxis
from trainfast_tui.charts.strip_chart import StripChart
from trainfast_tui.terminal.textual_app import TerminalApp
from trainfast_tui.text.format import watts

WIDTH, HEIGHT, POINTS, RATE = 120, 16, 600, 10
SECOND_NS = 1_000_000_000
SUBJECTS = {
    "idle": "empty screen",
    "chart": "StripChart, all new",
    "chart-newest": "StripChart, live",
    "chart-newest-plain": "the same by Textual itself",
    "sparkline": "Sparkline (one series)",
}
PLAIN = "-plain"
"""The ending of a subject that Textual sends by itself: a changed region whole, not its changed cells."""
READY = "READY"


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
    """Repaints one widget at `RATE` Hz, or nothing at all, with the product's own output to the terminal."""

    CSS = f"Screen {{ overflow: hidden; }} StripChart, Sparkline {{ width: {WIDTH}; height: {HEIGHT}; }}"

    def __init__(self, subject: str) -> None:
        super().__init__(plain_output=subject.endswith(PLAIN))
        self._subject, self._ticks = subject.removesuffix(PLAIN), count()

    def compose(self) -> ComposeResult:
        yield Label(READY)
        if self._subject == "sparkline":
            yield Sparkline(chart_at(0).series[0].values)  # type: ignore[arg-type]
        else:
            yield StripChart() if self._subject.startswith("chart") else Widget()

    def on_mount(self) -> None:
        self.set_interval(1 / RATE, self._repaint)

    def _repaint(self) -> None:
        # Six points are one cell of this window: every frame is another picture. As in a live run, one new point a
        # frame changes the last cell alone in five frames of six.
        data = chart_at(next(self._ticks) * (6 if self._subject == "chart" else 1))
        if self._subject.startswith("chart"):
            self.query_one(StripChart).show_chart(data)
        elif self._subject == "sparkline":
            self.query_one(Sparkline).data = data.series[0].values  # type: ignore[assignment]


def main() -> int:
    """Measure each subject and print the table; `--subject` is the app itself."""
    asked = options(__doc__, seconds=8.0, subject="").parse_args()
    if asked.subject:
        Painted(asked.subject).run()
        return 0
    command, folder = (sys.executable, "-m", "benchmarks.chart", "--subject"), Path(__file__).parents[1]
    seen = {each: measure([*command, each], seconds=asked.seconds, until=READY, cwd=folder) for each in SUBJECTS}
    lines = [
        (f"{WIDTH}x{HEIGHT}, {POINTS} points a series, {RATE} Hz", "CPU a frame", "bytes a frame", "largest frame")
    ]
    for subject, each in seen.items():
        cpu_ms = (each.cpu_percent - seen["idle"].cpu_percent) * 10 / RATE
        sizes = (f"{each.bytes_per_s / RATE / 1e3:.2f} kB", f"{each.largest_frame_bytes / 1e3:.2f} kB")
        lines.append((SUBJECTS[subject], f"{cpu_ms:.2f} ms", *sizes))
    print_columns(lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
