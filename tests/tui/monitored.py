"""A machine of several GPUs on the monitor, without a driver."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace
from recorded import GIB, MIB, START_NS, S, a_gpu, a_tick
from still import StillApp, a_snapshot, screen_text
from textual.pilot import Pilot

from trainfast_runner.machine.process_list import ProcessRow
from trainfast_runner.machine.processes import Identity
from trainfast_runner.records.tick import Tick
from trainfast_tui.control.messages import SnapshotTaken
from trainfast_tui.live.snapshot import Snapshot


def a_full_tick(second: int, gpus: int = 8) -> Tick:
    """Every GPU gives every reading; GPU 5 sits in a slot of half the width and had a memory error."""
    devices = [
        a_gpu(
            index,
            second,
            t_ns=START_NS + second * S,
            memory_utilization_percent=40 + index,
            degrees_to_slowdown_c=(91 - 61 - index) if index != 3 else 3,
            gpu_max_temperature_c=88,
            memory_temperature_c=78 + index,
            memory_max_temperature_c=95,
            memory_clock_mhz=3201,
            memory_clock_max_mhz=3201,
            power_average_w=601.0,
            power_instant_w=655.0,
            energy_mj=600_000 * second,
            thermal_violation_ns=S * second if index == 3 else 0,
            power_violation_ns=S * second // 4 if index == 1 else 0,
            pcie_generation=5,
            pcie_generation_max=5,
            pcie_width=8 if index == 5 else 16,
            pcie_width_max=16,
            pcie_tx_bytes=second * GIB,
            pcie_rx_bytes=second * 512 * MIB,
            nvlink_tx_bytes=second * 100 * GIB,
            nvlink_rx_bytes=second * 90 * GIB,
            ecc_corrected_errors=0,
            ecc_uncorrected_errors=1 if index == 5 else 0,
            remapped_rows_corrected=0,
            remapped_rows_uncorrected=1 if index == 5 else 0,
            remapped_rows_pending=1 if index == 5 else 0,
        )
        for index in range(gpus)
    ]
    tick = a_tick(second, live=False)
    host = replace(
        tick.host,
        load_1m=3.2,
        memory_available_bytes=4 * GIB,
        swap_used_bytes=0,
        disk_read_bytes=second * 80 * MIB,
        disk_write_bytes=second * MIB,
        network_received_bytes=second * 2 * MIB,
        network_sent_bytes=second * MIB,
    )
    missing = {f"gpu{index}.fan_percent": "not supported" for index in range(gpus)}
    return replace(tick, devices=devices, host=host, missing=missing, sample_us=12_400)


def some_rows(gpus: int = 8) -> tuple[ProcessRow, ...]:
    return tuple(
        ProcessRow(
            4000 + at,
            Identity(4000 + at, 5),
            "root" if at == 2 else "anna",
            at != 2,
            f"/usr/bin/python train_{at}.py --lr 3e-4",
            12.5 * at,
            at * 900 * MIB,
            3600 * at + 7,
            ((at, (60 - at) * GIB),) if at < min(gpus, 3) else (),
        )
        for at in range(5)
    ) + ((ProcessRow(99_999, devices=((6, 3 * GIB),)),) if gpus else ())


def the_machine(gpus: int = 8, *, rows: tuple[ProcessRow, ...] | None = None) -> Snapshot:
    ticks = tuple(a_full_tick(second, gpus) if gpus else a_tick(second, live=False) for second in range(80))
    snapshot = a_snapshot(None, second=80, ticks=ticks)
    return replace(snapshot, processes=some_rows(gpus) if rows is None else rows)


async def opened(pilot: Pilot[Any], snapshot: Snapshot) -> str:
    app = pilot.app
    assert isinstance(app, StillApp)
    app.post(SnapshotTaken(snapshot))
    await pilot.pause()
    await pilot.press("m")
    await pilot.pause()
    app.post(SnapshotTaken(snapshot))
    await pilot.pause()
    await pilot.pause()
    return screen_text(app)
