"""What screens have in common: they know the app as what it is; the keys of the charts, and of a page of text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainfast_tui.charts.column import Charts
from trainfast_tui.widgets.page import Page

if TYPE_CHECKING:
    from textual.screen import Screen

    from trainfast_tui.app import TrainfastApp

    Base = Screen[None]
else:
    Base = object


class OfTheApp:
    """Mixed into a screen that asks more of the app than Textual's own has."""

    @property
    def trainfast(self: Any) -> TrainfastApp:
        """The app, as what it is."""
        app: TrainfastApp = self.app
        return app


class PageActions(Base):
    """Mixed into a screen that is one `Page`: what its keys do."""

    def action_scroll(self, by: int) -> None:
        self.query_one(Page).scroll_lines(by)

    def action_back(self) -> None:
        self.dismiss()


class ChartActions(Base):
    """Mixed into a screen with `Charts`: what their keys do."""

    if TYPE_CHECKING:

        def say(self, text: str, tone: str = "text") -> None: ...

    def action_reading(self) -> None:
        self.say(self.query_one(Charts).next_reading())

    def action_event(self, by: int) -> None:
        self.say(self.query_one(Charts).next_event(by))

    def action_zoom(self, by: int) -> None:
        self.say(self.query_one(Charts).zoom(by))
