"""`monitor`: the machine's readings as a table, or as JSON, one object a tick."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.machine.telemetry import throttle
from trainfast_runner.machine.telemetry.host import HostReader
from trainfast_runner.machine.telemetry.nvml import Nvml
from trainfast_runner.machine.telemetry.sampler import Cadence, read_tick, take_tick
from trainfast_runner.machine.telemetry.throttle import slows_down_at_c
from trainfast_runner.records.tick import DeviceReading, Tick
from trainfast_tui.cli.arguments import finite
from trainfast_tui.cli.printing.monitor_details import ecc_errors, lines_below
from trainfast_tui.cli.printing.output import can_redraw, print_json, print_lines
from trainfast_tui.text.format import (
    ABSENT,
    beside_limit,
    celsius,
    megahertz,
    number,
    percent,
    size,
    watts,
)
from trainfast_tui.text.memory_words import no_memory_words
from trainfast_tui.text.tables import figure_headings, table
from trainfast_tui.text.topology import pcie_link

FIGURES = figure_headings("MEMORY", "BUSY", "TEMP", "POWER", "SM CLOCK", "PCIE", "ECC ERRORS")
HEADER = ("GPU", "NAME", *FIGURES, "THROTTLED")
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.1, 3600.0
FIRST_INTERVAL_S = 0.2
"""Seconds until the first reading is printed: enough for its rates."""
OPEN_DRIVER_S = 1.0
"""Seconds that a slow driver may delay the first reading."""


def monitor_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--once", action="store_true", help="one reading, then exit")
    parser.add_argument("--interval", type=finite, default=1.0, metavar="S", help="seconds between readings (1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object a reading")


def monitor(arguments: argparse.Namespace) -> int:
    """Print readings until Ctrl-C, which `main` turns into exit code 130."""
    if not MIN_INTERVAL_S <= arguments.interval <= MAX_INTERVAL_S:
        raise UserError(
            f"--interval {arguments.interval:g} is out of range",
            key="--interval",
            allowed=[f"{MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g} seconds"],
        )
    if arguments.once:
        _print(take_tick(), arguments.json)
        return 0
    _stream(arguments.interval, arguments.json)
    return 0


def _stream(interval_s: float, as_json: bool) -> None:
    """Print a tick every `interval_s` seconds until Ctrl-C; readers stay open, so rates cover the whole interval."""
    # A slow driver does not delay the host's readings; later ticks have its GPUs.
    nvml, host, cadence = Nvml(opening_s=OPEN_DRIVER_S), HostReader(), Cadence(interval_s)
    redraw = can_redraw(sys.stdout) and not as_json
    try:
        read_tick(nvml, host)
        due = time.monotonic() + min(FIRST_INTERVAL_S, interval_s)
        while True:
            time.sleep(max(0.0, due - time.monotonic()))
            tick = read_tick(nvml, host)
            cadence.adapt_to(tick)
            if redraw:
                sys.stdout.write("\x1b[H\x1b[J")
            _print(tick, as_json)
            sys.stdout.flush()
            due = cadence.next_due_s(due)
    finally:
        nvml.close()


def _print(tick: Tick, as_json: bool) -> None:
    if as_json:
        print_json(_as_json(tick))
        return
    print_lines(_lines(tick))


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


def _lines(tick: Tick) -> list[str]:
    host = tick.host
    lines = [
        f"host  CPU {percent(host.cpu_percent)} of {host.cpu_count or ABSENT} cores"
        f"  load {number(host.load_1m)}  memory {size(host.memory_used_bytes)} of {size(host.memory_total_bytes)}"
        + (f"  {celsius(host.temperature_c)}" if host.temperature_c is not None else "")
        + f"  sampled in {tick.sample_us:,} µs"
    ]
    if "sampler.period" in tick.missing:
        lines.append(tick.missing["sampler.period"])
    if not tick.devices:
        return [*lines, f"no GPU: {tick.missing.get('nvml', 'none is listed')}"]
    rows = [_row(gpu, tick.missing) for gpu in tick.devices]
    # A sentence with its cure does not fit in a cell.
    silent = [f"GPU {gpu.index}: {gpu.error}" for gpu in tick.devices if gpu.error]
    return [
        *lines,
        *table(HEADER, rows, max_cells=48),
        *silent,
        *lines_below(tick.devices),
    ]


def _row(gpu: DeviceReading, missing: Mapping[str, str]) -> tuple[str, ...]:
    name = str(gpu.index), gpu.name or ABSENT
    if gpu.error:
        return (*name, *[ABSENT] * len(FIGURES), "does not answer")
    memory = f"{size(gpu.memory_used_bytes)} of {size(gpu.memory_total_bytes)}"
    if gpu.memory_used_bytes is None and gpu.memory_total_bytes is None:
        memory = no_memory_words(gpu.index, missing)
    return (
        *name,
        memory,
        percent(gpu.gpu_utilization_percent),
        celsius(gpu.temperature_c),
        beside_limit(watts(gpu.power_w), watts(gpu.power_limit_w)),
        beside_limit(megahertz(gpu.sm_clock_mhz), megahertz(gpu.sm_clock_max_mhz)),
        pcie_link(gpu),
        ecc_errors(gpu),
        ABSENT if gpu.throttle_reasons is None else ", ".join(map(throttle.cause_text, gpu.throttle_reasons)) or "no",
    )
