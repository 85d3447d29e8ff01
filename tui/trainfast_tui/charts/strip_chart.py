"""The widget of one strip chart."""

from trainfast_tui.charts.chart_data import ChartData
from trainfast_tui.charts.paint import paint
from trainfast_tui.charts.y_range import YRange
from trainfast_tui.painting.palettes import Palette
from trainfast_tui.painting.row_widget import RowWidget, SegmentRows


class StripChart(RowWidget):
    """Draws the newest `ChartData`; sends only the cells that changed.

    Give its container the border: a border on the chart would be sent again with it.
    """

    DEFAULT_CSS = "StripChart { height: 1fr; width: 1fr; }"

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

    def show_chart(self, data: ChartData) -> None:
        """Draw this; the y range is fitted afresh for another title, `y_range_key`, or fixed end of the y axis."""
        if self._data is not None and _axis_of(self._data) != _axis_of(data):
            self._y_range.reset()
        self._data = data
        self.repaint()

    def rows(self, width: int, height: int, palette: Palette) -> SegmentRows:
        data, y_range = self._data, self._y_range
        if data is None:
            return []
        return paint(data, width, height, y_range, palette, time_labels=self._time_labels, gutter=self._gutter)


def _axis_of(data: ChartData) -> tuple[object, ...]:
    return data.title, data.y_range_key, data.y_min, data.y_max, data.binary
