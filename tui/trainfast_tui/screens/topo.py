"""How the GPUs of this machine are connected, and what that means for the strategies."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.message import Message
from textual.screen import Screen

from trainfast_runner.machine.telemetry.topology import Topology, read_topology
from trainfast_tui.control.background import in_background
from trainfast_tui.control.messages import said_no
from trainfast_tui.screens.shared import PageActions
from trainfast_tui.text.keys import bindings, of
from trainfast_tui.text.lines import Line, rule, wrap
from trainfast_tui.text.topology import SILENT, sections
from trainfast_tui.widgets.page import Page
from trainfast_tui.widgets.strips import Footer

PROSE = ("for training",)
TABLES = ("links between GPUs", "GPUs")


class TopologyRead(Message):
    """NVML has answered."""

    def __init__(self, topology: Topology) -> None:
        super().__init__()
        self.topology = topology


class TopoScreen(PageActions, Screen[None]):
    """Asks NVML in a thread of its own: the driver may take its time."""

    SCOPE = "topo"
    BINDINGS = [*bindings("topo")]
    DEFAULT_CSS = "TopoScreen { layout: vertical; overflow: hidden; }"

    def __init__(self, *, ascii: bool) -> None:
        super().__init__()
        self._ascii = ascii

    def compose(self) -> ComposeResult:
        yield TopologyText(ascii=self._ascii)
        yield Footer([*of("topo"), *of("everywhere")], ascii=self._ascii)

    def on_mount(self) -> None:
        self.action_reload()

    def on_topology_read(self, message: TopologyRead) -> None:
        self.query_one(TopologyText).show(message.topology)

    def action_reload(self) -> None:
        in_background("topology", lambda: TopologyRead(read_topology()), self.post_message, said_no)


class TopologyText(Page):
    """The matrix and all below it; empty until the driver has answered."""

    def __init__(self, *, ascii: bool) -> None:
        super().__init__(ascii=ascii)
        self._topology: Topology | None = None

    def show(self, topology: Topology) -> None:
        """Show this one."""
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
