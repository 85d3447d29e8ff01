"""The connections between the GPUs of this machine, with advice on the strategies."""

from __future__ import annotations

from collections.abc import Iterator

from trainfast_runner.machine.telemetry.topology import Topology, read_topology
from trainfast_tui.control.messages import ScreenMessage
from trainfast_tui.control.threads import start_thread
from trainfast_tui.screens.base import PageScreen, PostedMessage
from trainfast_tui.session import Session
from trainfast_tui.text.format import Line, labelled, paragraph, rule
from trainfast_tui.text.topology import TopologySection, topology_sections


class TopologyRead(ScreenMessage, frozen=True):
    """NVML has answered."""

    topology: Topology


class TopoScreen(PageScreen):
    """The matrix and the sections below. NVML is read in a thread: the driver may take its time."""

    SCOPE = "topo"

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._topology: Topology | None = None
        """None until the driver has answered."""

    def on_mount(self) -> None:
        self.action_reload()

    def on_posted_message(self, message: PostedMessage) -> None:
        if isinstance(message.content, TopologyRead):
            self._topology = message.content.topology
            self.repaint()

    def action_reload(self) -> None:
        start_thread("topology", lambda: TopologyRead(read_topology()), self.post)

    def body(self, width: int) -> list[Line]:
        if self._topology is None:
            return [rule("topology", width), [("Asking the driver…", "muted")]]
        body: list[Line] = []
        for section in topology_sections(self._topology):
            body += [[], rule(section.title, width), *_section_lines(section, width)]
        return body[1:]


def _section_lines(section: TopologySection, width: int) -> Iterator[Line]:
    for number, line in enumerate(section.lines):
        if section.kind == "prose":
            yield from labelled(("• ", "key"), line, width)
        elif section.kind == "errors":
            yield from paragraph(line, width, "error")
        else:
            yield [(line, "title" if section.kind == "table" and number == 0 else "text")]
