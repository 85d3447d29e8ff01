"""The widget of one strip chart."""

from collections.abc import Mapping

from rich.style import Style

from trainfast_tui.charts.braille import YRange, ink
from trainfast_tui.charts.inks import inks
from trainfast_tui.charts.model import PARTS, SERIES_TONES, ChartData
from trainfast_tui.charts.paint import paint
from trainfast_tui.charts.row_widget import Rows, RowWidget
from trainfast_tui.text.shades import NAMES, OTHER

SHADED = (*NAMES, OTHER)


class StripChart(RowWidget):
    """Draws the newest `ChartData`; sends only the cells that changed.

    Give its container the border: a border on the chart would be sent again with it.
    """

    DEFAULT_CSS = """
    StripChart {
        height: 1fr; width: 1fr;
        .strip-chart--primary { color: $text-primary; }
        .strip-chart--secondary { color: $text-secondary; }
        .strip-chart--accent { color: $text-accent; }
        .strip-chart--success { color: $text-success; }
        .strip-chart--warning { color: $text-warning; }
        .strip-chart--error { color: $text-error; }
        .strip-chart--title { text-style: bold; }
        .strip-chart--axis { color: $text-muted; }
        .strip-chart--empty { color: $text-muted; }
        .strip-chart--limit { color: $text-error; }
        .strip-chart--mark { color: $text-warning; text-style: bold; }
        .strip-chart--thermal, .strip-chart--brake, .strip-chart--hardware { color: $text-error; }
        .strip-chart--power, .strip-chart--other { color: $text-warning; }
        .strip-chart--sync_boost { color: $text-secondary; }
    }
    """

    def __init__(
        self,
        *,
        time_labels: bool = True,
        gutter: int = 10,
        id: str | None = None,
        classes: str | None = None,
    ) -> None:
        super().__init__(id=id, classes=classes)
        self._time_labels = time_labels
        self._gutter = gutter
        self._data: ChartData | None = None
        self._y_range = YRange()

    def show(self, data: ChartData) -> None:
        """Draw this; the y range starts anew for another title, `scale_of`, or fixed end of the y axis."""
        if self._data is not None and _axis_of(self._data) != _axis_of(data):
            self._y_range.reset()
        self._data = data
        self.repaint()

    def rows(self, width: int, height: int, palette: Mapping[str, Style]) -> Rows:
        data, y_range = self._data, self._y_range
        if data is None:
            return []
        return paint(data, width, height, y_range, palette, time_labels=self._time_labels, gutter=self._gutter)

    def find_palette(self) -> Mapping[str, Style]:
        # A partial style leaves a muted colour unblended, which is white on a light theme.
        whole = inks(self, "strip-chart", (*SERIES_TONES, *PARTS, *SHADED))
        return {name: ink(style) for name, style in whole.items()}


def _axis_of(data: ChartData) -> tuple[object, ...]:
    return data.title, data.scale_of, data.y_min, data.y_max, data.binary
