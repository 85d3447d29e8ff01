"""The machine of a report's runs: versions, devices, driver and conditions, each value with the runs that had it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainfast_runner.known_values import mean_of_known
from trainfast_runner.results.comparison.conditions import compared_conditions
from trainfast_runner.units import counted
from trainfast_tui.report.blocks import Block, Heading, Prose, pairs_grid
from trainfast_tui.report.reported_run import ReportedRun
from trainfast_tui.text.format import percent, size


def machine_blocks(runs: Sequence[ReportedRun]) -> list[Block]:
    """Return the table; a value that every run shares stands alone."""
    labels_by_fact: dict[str, dict[str, list[str]]] = {}
    for run in runs:
        for name, value in _facts(run):
            labels_by_fact.setdefault(name, {}).setdefault(value, []).append(run.label)
    rows = [(name, _value_with_runs(labels_by_value, len(runs))) for name, labels_by_value in labels_by_fact.items()]
    table: Block = pairs_grid("", rows) if rows else Prose("Nothing about the machine is on record.")
    return [Heading("Machine"), table]


def _value_with_runs(labels_by_value: dict[str, list[str]], run_count: int) -> str:
    """Return the value that all runs share, or each value with the labels of the runs that have it."""
    if len(labels_by_value) == 1 and sum(map(len, labels_by_value.values())) == run_count:
        return next(iter(labels_by_value))
    return "; ".join(f"{value} ({', '.join(labels)})" for value, labels in labels_by_value.items())


def _facts(run: ReportedRun) -> Iterator[tuple[str, str]]:
    """Yield each fact on record by name."""
    run_file, result = run.run_file, run.result
    if run_file is not None:
        names = f": {', '.join(run_file.device_names)}" if run_file.device_names else ""
        yield "device", f"{run_file.device}{names}, {counted(run_file.world_size, 'process', 'processes')}"
    yield from _host(run)
    gpus = dict.fromkeys(device.name for tick in run.snapshot.ticks[-1:] for device in tick.devices if device.name)
    if gpus:
        yield "GPUs of the machine", ", ".join(gpus)
    if run_file is not None:
        if run_file.link is not None:
            yield "slowest link", run_file.link
        yield from ((name, version) for name, version in run_file.versions.items() if version and name != "driver")
    for row in compared_conditions(result, result):
        if row.a is not None:
            yield row.label, row.a
    if result.cpu is not None and result.cpu.threads is not None:
        yield "threads of a rank", str(result.cpu.threads)


def _host(run: ReportedRun) -> Iterator[tuple[str, str]]:
    host = next((tick.host for tick in run.snapshot.ticks if tick.host.cpu_count), None)
    if host is None:
        return
    yield "CPU cores", str(host.cpu_count)
    if host.memory_total_bytes is not None:
        yield "host memory", size(host.memory_total_bytes)
    cpu_percent = mean_of_known(tick.host.cpu_percent for tick in run.snapshot.ticks)
    if cpu_percent is not None:
        yield "CPU in use, of all cores", f"{percent(cpu_percent)} on average"
