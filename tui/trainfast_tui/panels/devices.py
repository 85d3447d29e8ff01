"""The devices at the top of the screen, a row each: the GPUs and the host, or the CPU as the device."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from trainfast_runner.machine.telemetry import binding
from trainfast_runner.units import counted
from trainfast_tui.live.snapshot import Snapshot, used_uuids
from trainfast_tui.painting import PaintedWidget
from trainfast_tui.text import format as fmt
from trainfast_tui.text.device_lines import LONG_DEVICE_WORDS_FROM, gpu_line, host_line
from trainfast_tui.text.format import Line

if TYPE_CHECKING:
    from trainfast_runner.records.tick import Tick


class DevicesPanel(PaintedWidget):
    """Shows the newest tick in as many rows as it needs."""

    _snapshot: Snapshot | None = None

    def show_snapshot(self, snapshot: Snapshot) -> None:
        """Show the devices of this snapshot."""
        self._snapshot, tick = snapshot, snapshot.tick
        others = sum(1 + len(other.devices) for _, other in _other_nodes(snapshot))
        self.set_height(1 + max(1, len(tick.devices) if tick is not None else 0) + others)
        self.repaint()

    def lines(self, width: int, height: int) -> list[Line]:
        snapshot = self._snapshot
        tick = snapshot.tick if snapshot is not None else None
        if snapshot is None or tick is None:
            return [[("devices: looking…", "muted")]]
        used = used_uuids(snapshot.run)
        return [
            *(gpu_line(device, width, device.uuid in used, tick.missing) for device in tick.devices),
            *_host_lines(snapshot, tick, width),
            *(line for host, other in _other_nodes(snapshot) for line in _node_lines(host, other, used, width)),
        ]


def _other_nodes(snapshot: Snapshot) -> tuple[tuple[str, Tick], ...]:
    """The hosts and newest ticks of the other nodes of a live run."""
    return snapshot.run.other_nodes if snapshot.run is not None and snapshot.run.is_live else ()


def _node_lines(host: str, tick: Tick, used: Collection[str], width: int) -> list[Line]:
    """The host of another node, and below it its GPUs."""
    devices = [gpu_line(device, width, device.uuid in used, tick.missing) for device in tick.devices]
    return [[(f"{host}: ", "text"), *host_line(tick.host, tick.host.cpu_percent, width, bool(devices))], *devices]


def _host_lines(snapshot: Snapshot, tick: Tick, width: int) -> list[Line]:
    long_words, host, has_gpu = width >= LONG_DEVICE_WORDS_FROM, tick.host, bool(tick.devices)
    head = host_line(host, snapshot.cpu_percent, width, has_gpu)
    run = host.run
    if run is not None and snapshot.run is not None and snapshot.run.is_live:
        tail: Line = [
            (" this run: " if long_words else " run: ", "muted"),
            (f"{fmt.percent(run.cpu_percent)} of a core", "text"),
            ("  process memory ", "muted"),
            (f"{fmt.size(run.memory_rss_bytes)}  {counted(run.processes, 'process', 'processes')}", "text"),
        ]
    elif has_gpu:
        tail = []
    else:
        tail = [(" no GPU", "muted"), *_driver_failure(tick)]
    if has_gpu:
        return [[*head, ("  ", "text"), *tail]]
    return [head, tail]


def _driver_failure(tick: Tick) -> Line:
    """Name the reason a driver shows no GPU; a machine without a driver has no problem."""
    without_driver = binding.LIBRARY_FAILURES[binding.LIBRARY_NOT_FOUND].sentence
    failure = tick.missing.get("nvml", without_driver)
    return [] if failure == without_driver else [(f": {failure}", "warning")]
