"""`monitor`: the machine's readings as a table, or as JSON, one object a tick."""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.machine.device_events import defects
from trainfast_runner.machine.hosts import LOCAL, parse_hosts
from trainfast_runner.machine.processes import command_line, owner_of, sees_host_pids
from trainfast_runner.machine.telemetry.host import HostReader
from trainfast_runner.machine.telemetry.nvml import Nvml
from trainfast_runner.machine.telemetry.sampler import next_due_s, read_tick, take_tick
from trainfast_runner.machine.telemetry.throttle import slows_down_at_c
from trainfast_runner.machine.telemetry.topology import LEGEND, read_topology
from trainfast_runner.records.tick import DeviceReading, Tick
from trainfast_runner.units import counted
from trainfast_tui.cli.arguments import finite
from trainfast_tui.cli.printing import can_redraw, print_json, print_line, print_lines, terminal_width
from trainfast_tui.text.device_lines import gpu_line, host_line
from trainfast_tui.text.format import ABSENT, FigureHeading, cell_len, line_text, size, table, to_width, truncate
from trainfast_tui.text.topology import topology_sections

PIPE_WIDTH = 160
"""The width of lines for a pipe."""
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.1, 3600.0
FIRST_INTERVAL_S = 0.2
"""Seconds between the first two readings: enough for rates."""
CLEAR_SCREEN = "\x1b[H\x1b[J"
OPEN_DRIVER_S = 1.0
"""Seconds that a slow driver may delay the first reading."""


def monitor_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--once", action="store_true", help="one reading, then exit")
    parser.add_argument("--interval", type=finite, default=1.0, metavar="S", help="seconds between readings (1)")
    parser.add_argument(
        "--hosts",
        metavar="A,B",
        help="the machines of these names, or of a hostfile, over ssh; `local` is this one; with --json their readings"
        " are in `hosts`",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a reading")


def monitor(arguments: argparse.Namespace) -> int:
    """Print readings until Ctrl-C, which `main` turns into exit code 130."""
    if not MIN_INTERVAL_S <= arguments.interval <= MAX_INTERVAL_S:
        raise UserError(
            f"--interval {arguments.interval:g} is out of range",
            key="--interval",
            allowed=[f"{MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g} seconds"],
        )
    if arguments.hosts is not None:
        # Late: the monitor of one machine needs no threads for its first reading.
        from trainfast_tui.cli.monitor_hosts import monitor_hosts

        show = None if arguments.json else partial(_show, redraws=can_redraw(sys.stdout) and not arguments.once)
        return monitor_hosts(parse_hosts(arguments.hosts), arguments.interval, once=arguments.once, show=show)
    if arguments.once:
        _print(take_tick(), arguments.json)
        return 0
    redraws, host = can_redraw(sys.stdout) and not arguments.json, HostReader()
    # A slow driver does not delay the host's readings; later ticks have its GPUs.
    with closing(Nvml(opening_s=OPEN_DRIVER_S)) as nvml:
        tick = read_tick(nvml, host)
        due = time.monotonic() + min(FIRST_INTERVAL_S, arguments.interval)
        if redraws:
            # A screen need not wait for the rates, which the second reading has.
            _print(tick, as_json=False, redraws=True)
        while True:
            time.sleep(max(0.0, due - time.monotonic()))
            _print(read_tick(nvml, host), arguments.json, redraws)
            due = next_due_s(due, arguments.interval)


def _print(tick: Tick, as_json: bool, redraws: bool = False) -> None:
    if as_json:
        print_json(_as_json(tick))
        sys.stdout.flush()
        return
    _show({"": tick}, redraws)


def _show(found: Mapping[str, Tick | str], redraws: bool) -> None:
    """Print the readings, with `redraws` in place of what the terminal shows; lines below its last row are counted."""
    lines = _lines(found)
    if redraws:
        # The cursor has the last row: a line there would push the first one out.
        columns, rows = shutil.get_terminal_size()
        ends = list(itertools.accumulate(max(1, -(-cell_len(line) // columns)) for line in lines))
        if ends[-1] > rows - 1:
            fitting = sum(end < rows - 1 for end in ends)
            lines = [*lines[:fitting], f"{counted(len(lines) - fitting, 'more line')}: they need a taller terminal"]
        sys.stdout.write(CLEAR_SCREEN)
    print_lines(lines)
    sys.stdout.flush()


def _as_json(tick: Tick) -> dict[str, Any]:
    """Return the tick as JSON, each GPU with its first temperature limit, which `degrees_to_slowdown_c` counts to."""
    fields: dict[str, Any] = msgspec.to_builtins(tick)
    fields["missing"]["host.run"] = "the monitor looks at the machine: what a run uses is in its own records"
    for device_fields, gpu in zip(fields["devices"], tick.devices, strict=True):
        device_fields["slows_down_at_c"] = slows_down_at_c(gpu)
        why = tick.missing.get(f"gpu{gpu.index}.degrees_to_slowdown_c")
        if device_fields["slows_down_at_c"] is None and why is not None:
            fields["missing"][f"gpu{gpu.index}.slows_down_at_c"] = why
    return fields


def _lines(found: Mapping[str, Tick | str]) -> list[str]:
    """Return the row of each machine and those of its GPUs, then errors, their cures and the processes.

    `found` has the reading of each host, or the reason for none. A machine without a name has no column of hosts.
    """
    names = [*found]
    names += [f"{host}:{gpu.index}" for host, one in found.items() if isinstance(one, Tick) for gpu in one.devices]
    width, host_cells = terminal_width() or PIPE_WIDTH, 1 + max(map(len, names)) if any(found) else 0
    rows, below, without_gpu = list[str](), list[str](), dict[str, list[str]]()
    for host, one in found.items():
        if isinstance(one, str):
            # Whole, over several rows where it is long: it ends with the time of the next try.
            rows.append(to_width(host, host_cells) + one)
            continue
        machine = host_line(one.host, one.host.cpu_percent, width - host_cells, bool(one.devices or host))
        lines = {host: machine} | {
            f"{host}:{gpu.index}": gpu_line(gpu, width - host_cells, is_used=False, missing=one.missing)
            for gpu in one.devices
        }
        rows += [truncate(to_width(name, host_cells) + line_text(line), width) for name, line in lines.items()]
        below += lines_below(one.devices, host)
        if not one.devices:
            without_gpu.setdefault(one.missing.get("nvml", "none is listed"), []).append(f" on {host}" if host else "")
    return [*rows, *(f"no GPU{','.join(hosts)}: {why}" for why, hosts in without_gpu.items()), *below]


def lines_below(gpus: Sequence[DeviceReading], host: str = "") -> list[str]:
    """Return the lines below the rows: the processes on the GPUs, then each problem with its cure.

    Owner and command are unknown on another machine, and in a container, where the driver gives host process ids.
    """
    of_host, gpu_of = (f"{host} ", f"{host} GPU") if host else ("", "GPU")
    answering = [gpu for gpu in gpus if not gpu.error]
    rows: list[tuple[str, ...]] = []
    for gpu in answering:
        for process in gpu.processes or ():
            seen = owner_of(process.pid) if host in ("", LOCAL) and sees_host_pids() else None
            owner, command = (ABSENT, ABSENT) if seen is None else (seen[0], command_line(process.pid) or ABSENT)
            rows.append((f"{of_host}{gpu.index}", str(process.pid), owner, size(process.memory_used_bytes), command))
    lines = (
        ["", *table(("GPU", "PID", "OWNER", FigureHeading("MEMORY"), "COMMAND"), rows, max_cells=48)] if rows else []
    )
    wrong = [f"{gpu_of} {gpu.index}: {one.finding}. Cure: {one.cure}" for gpu in answering for one in defects(gpu)]
    # A sentence with its cure does not fit in a row.
    lost = [f"{gpu_of} {gpu.index}: {gpu.error}" for gpu in gpus if gpu.error]
    return [*lost, *lines, *([""] if lines and wrong else []), *wrong]


def topo_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print {devices, matrix, p2p, legend, advice}")


def topo(arguments: argparse.Namespace) -> int:
    """Print matrix, links, legend and advice; return 0 with and without a GPU."""
    # The advice knows what a run may use, which `monitor` does not need for its first reading.
    from trainfast_runner.machine.telemetry.topology import link_advice

    topology = read_topology()
    if arguments.json:
        print_json({**msgspec.to_builtins(topology), "legend": LEGEND, "advice": link_advice(topology)})
        return 0
    if not topology.devices:
        print_lines(link_advice(topology))
        return 0
    for index, section in enumerate(topology_sections(topology)):
        if index:
            print_line()
        print_line(section.title)
        for line in section.lines:
            print_line(f"  {line}")
    return 0
