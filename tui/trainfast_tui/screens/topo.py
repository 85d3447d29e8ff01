"""How the GPUs of this machine are connected, and what that means for the strategies."""

from __future__ import annotations

from dataclasses import dataclass

from textual.app import ComposeResult

from trainfast_runner.machine.telemetry.topology import Topology, read_topology
from trainfast_tui.control.background import in_background
from trainfast_tui.screens.base import AppScreen, SessionMessage
from trainfast_tui.text.keys import bindings
from trainfast_tui.text.lines import Line, rule, wrap
from trainfast_tui.text.topology import SILENT, sections
from trainfast_tui.widgets.page import Page

PROSE = ("for training",)
TABLES = ("links between GPUs", "GPUs")


@dataclass(frozen=True, slots=True)
class TopologyRead:
    """NVML has answered."""

    topology: Topology


class TopoScreen(AppScreen):
    """Reads NVML in a thread: the driver may take its time."""

    SCOPE = "topo"
    BINDINGS = [*bindings(SCOPE)]

    def compose(self) -> ComposeResult:
        yield TopologyText()
        yield self.footer()

    def on_mount(self) -> None:
        self.action_reload()

    def on_session_message(self, message: SessionMessage) -> None:
        if isinstance(message.content, TopologyRead):
            self.query_one(TopologyText).show(message.content.topology)

    def action_reload(self) -> None:
        in_background("topology", lambda: TopologyRead(read_topology()), self.post)


class TopologyText(Page):
    """The matrix and the sections below it; empty until the driver has answered."""

    def __init__(self) -> None:
        super().__init__()
        self._topology: Topology | None = None

    def show(self, topology: Topology) -> None:
        """Show this topology."""
        self._topology = topology
        self.repaint()

    def body(self, width: int) -> list[Line]:
        if self._topology is None:
            return [rule("topology", width), [("Asking the driver…", "muted")]]
        body: list[Line] = []
        for title, lines in sections(self._topology):
            body += [[], rule(title, width)]
            for line in lines:
                if title in PROSE:
                    first, *rest = wrap(line, max(10, width - 2))
                    body += [[("• ", "key"), (first, "text")], *([("  " + more, "text")] for more in rest)]
                elif SILENT in line:
                    body += [[(part, "error")] for part in wrap(line, max(10, width))]
                else:
                    body.append([(line, "title" if line is lines[0] and title in TABLES else "text")])
        return body[1:]
