"""The monitor: the machine for a person about to train, and ending a process of one's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from recorded import GIB, MIB, RAMP, START_NS, S, a_gpu, a_ramp_tick, a_run, a_tick, write_lines
from still import StillApp, a_snapshot, own_supervisor, running, screen_text
from textual.filter import Monochrome
from textual.pilot import Pilot

from trainfast_runner.errors import UserError
from trainfast_runner.machine.processes.identity import Identity, identify
from trainfast_runner.machine.processes.listing import ProcessRow
from trainfast_runner.machine.telemetry import failures
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_lines import Event
from trainfast_runner.records.tick import Tick
from trainfast_tui.control.messages import SnapshotTaken
from trainfast_tui.live.reader import Reader
from trainfast_tui.live.snapshot import Snapshot

SnapCompare = Callable[..., bool]


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


def test_eight_gpus_and_who_uses_them(home: Home, snap_compare: SnapCompare) -> None:
    async def before(pilot: Pilot[Any]) -> None:
        await opened(pilot, the_machine())
        await pilot.press("right", "right", "right", "right", "right", "down")

    assert snap_compare(StillApp(home), terminal_size=(160, 48), run_before=before)


def test_the_smallest_screen(home: Home, snap_compare: SnapCompare) -> None:
    async def before(pilot: Pilot[Any]) -> None:
        await opened(pilot, the_machine())

    assert snap_compare(StillApp(home), terminal_size=(80, 24), run_before=before)


async def test_every_reading_has_its_unit_and_every_warning_is_shown(home: Home) -> None:
    async with running(home, size=(160, 90)) as (_, pilot):
        text = await opened(pilot, the_machine())
        assert "T GPU 3 throttled by heat" in text.splitlines()[0]
        assert "P GPU 1 at the power limit" in text.splitlines()[0]
        assert "12.4 ms a sample, every 1 s" in text.splitlines()[0]
        for words in (
            "T throttled by heat 100 % of the last minute",
            "P at the power limit 25 % of the last minute",
            "slowdown in 30 °C, 88 °C (driver limit), 91 °C (hardware limit)",
            "memory temp 78 °C of 95 °C",
            "PCIe 5 x8 of 5 x16: below its maximum",
            "PCIe at least out 1.00 GiB/s, in 512 MiB/s",
            "NVLink out 100 GiB/s, in 90.0 GiB/s",
            "ECC errors 1 uncorrected, 0 corrected",
            "rows to remap waiting for a reset of the GPU",
            "no reading of fan percent: not supported",
            "storage read 80.0 MiB/s",
            "load 3.20",
        ):
            assert words in text, words
        assert "4002" in text
        assert "99999" in text
        assert "not visible from here" in text


async def test_without_a_gpu_the_cpu_is_the_device_and_the_reason_is_shown(home: Home) -> None:
    async with running(home, ascii=True, size=(80, 24)) as (app, pilot):
        text = await opened(pilot, the_machine(0))
        words = " ".join(text.split())
        assert "no GPU: no NVIDIA driver here: libnvidia-ml.so.1 was not found." in words
        assert "Runs use the CPU; with an NVIDIA card in this machine they need devices=cpu." in words
        assert "CPU of all cores" in text
        assert "GPU memory" not in text
        assert text.isascii()
        first = next(line for line in text.splitlines() if line.startswith("> "))
        assert "4004" in first, "the busiest comes first"
        await pilot.press("o", "o", "o")
        assert "processes by owner" in screen_text(app)
        await pilot.press("m")
        await pilot.pause()
        assert "No run yet" in screen_text(app)


async def test_a_lost_gpu_says_since_when_and_the_others_go_on(home: Home) -> None:
    ticks = [a_full_tick(second, 2) for second in range(80)]
    for second in range(60, 80):
        gone = a_gpu(1, error="GPU is lost", throttle_reasons=None)
        ticks[second] = replace(ticks[second], devices=[ticks[second].devices[0], gone])
    async with running(home, size=(140, 40)) as (app, pilot):
        text = await opened(pilot, replace(the_machine(2), ticks=tuple(ticks)))
        assert "lost for 20 s: GPU is lost" in text
        assert "GPU 1 does not answer" in text
        assert "✗  20 s ago  GPU 1 was lost: GPU is lost" in text
        assert "61.0 GiB of 139 GiB" in text
        await pilot.press("m")
        await pilot.pause()
        assert "lost for 20 s: GPU is lost" in screen_text(app), "on the main screen as well"


async def test_the_error_of_a_gpu_is_shown_whole_with_its_cure(home: Home) -> None:
    why = failures.device_failure(failures.GPU_IS_LOST, "")
    ticks = [a_full_tick(second, 8) for second in range(80)]
    ticks[79].devices[0] = a_gpu(0, error=why, throttle_reasons=None)
    async with running(home, size=(80, 24)) as (_, pilot):
        rows = (await opened(pilot, replace(the_machine(8), ticks=tuple(ticks)))).splitlines()
        assert rows[1].rstrip().endswith("lost for 1 s: GPU is lost: it no longer answers on its bus"), "no word is cut"
        assert " ".join(" ".join(rows[2:5]).split()).startswith(why), "below it all, as the chosen one says all"


async def test_events_are_shown_where_charts_do_not_fit(home: Home) -> None:
    ticks = [a_full_tick(second, 8) for second in range(80)]
    gone = a_gpu(5, error="GPU is lost: it no longer answers", throttle_reasons=None)
    ticks[79].devices[5] = gone
    async with running(home, size=(80, 24)) as (app, pilot):
        assert "✗  1 s ago  GPU 5 was lost: GPU is lost" in await opened(
            pilot, replace(the_machine(8), ticks=tuple(ticks))
        )
        await pilot.press("e")
        assert "GPU 5 was lost" in screen_text(app).splitlines()[-2]


async def test_charts_are_drawn_anew_when_they_move_by_a_cell(home: Home) -> None:
    """Drawing them is most of what a frame costs; the row of the GPU has its newest reading at once."""
    # A cell of this axis is 0.93 s long, and this moment a third into one.
    seen = replace(the_machine(1), taken_ns=START_NS + 80 * S + S * 3 // 10)
    hotter = replace(
        seen.ticks[-1], t_ns=seen.taken_ns, devices=[a_gpu(0, gpu_utilization_percent=17, t_ns=seen.taken_ns)]
    )
    async with running(home, size=(140, 40)) as (app, pilot):
        await opened(pilot, seen)
        for later_s, in_chart in ((0.2, False), (2.3, True)):
            now = replace(seen, taken_ns=seen.taken_ns + int(later_s * S), ticks=(*seen.ticks, hotter))
            app.post(SnapshotTaken(now))
            await pilot.pause()
            row, chart = (
                next(line for line in screen_text(app).splitlines() if of in line) for of in ("GPU 0", "GPU u")
            )
            assert "17 %" in row
            assert ("17 %" in chart) == in_chart


async def test_an_xid_error_stands_on_the_time_line(home: Home) -> None:
    xid = Event(t_ns=START_NS + 75 * S, kind="xid", device=1, detail="79: the GPU has fallen off the bus")
    async with running(home, size=(140, 60)) as (_, pilot):
        text = await opened(pilot, replace(the_machine(2), xids=(xid,)))
        assert "X  5 s ago  GPU 1: Xid error 79: the GPU has fallen off the bus" in text


async def test_while_a_run_is_live_its_samples_are_shown(home: Home, hold: Callable[[Path], None]) -> None:
    directory = a_run(home, with_result=False)
    hold(directory)
    write_lines(directory / "telemetry.jsonl", [a_ramp_tick(second) for second in range(RAMP.stop)])
    write_lines(directory / "events.jsonl", [own_supervisor(), Event(t_ns=START_NS, kind="state", state="running")])
    async with running(home, size=(140, 40)) as (_, pilot):
        text = await opened(pilot, a_snapshot(directory, second=RAMP.stop))
        assert "T GPU 0 throttled by heat" in text
        assert "looking at the processes" in text


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process of one's own that ignores SIGTERM once it has said so."""
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


async def test_ending_a_process_asks_first_then_offers_sigkill(home: Home, sleeper: subprocess.Popen[bytes]) -> None:
    row = ProcessRow(sleeper.pid, identify(sleeper.pid), "anna", True, "sleeper --long", 0.0, MIB, 5.0)
    snapshot = the_machine(0, rows=(row,))
    async with running(home, size=(120, 40)) as (app, pilot):
        await opened(pilot, snapshot)
        await pilot.press("x")
        await pilot.pause()
        text = screen_text(app)
        assert f"End process {sleeper.pid}?" in text
        assert "sleeper --long" in text
        assert "send SIGTERM" in text
        await pilot.press("n")
        await pilot.pause()
        assert sleeper.poll() is None
        await pilot.press("x", "y")
        await pilot.pause()
        assert "SIGTERM sent" in screen_text(app)
        assert "x again offers SIGKILL" in screen_text(app)
        assert sleeper.poll() is None
        await pilot.press("x")
        await pilot.pause()
        assert "it still runs. SIGKILL gives it no chance" in screen_text(app)
        await pilot.press("y")
        await pilot.pause()
        assert sleeper.wait(60) == -signal.SIGKILL
        app.post(SnapshotTaken(snapshot))
        await pilot.pause()
        assert f"Process {sleeper.pid} has ended." in screen_text(app)


async def test_a_process_of_a_run_is_ended_by_stopping_the_run(
    home: Home, hold: Callable[[Path], None], sleeper: subprocess.Popen[bytes]
) -> None:
    directory = a_run(home, with_result=False)
    hold(directory)
    supervisor = identify(sleeper.pid)
    assert supervisor is not None
    started = Event(t_ns=START_NS, kind="supervisor", pid=supervisor.pid, start_ticks=supervisor.start_ticks)
    write_lines(directory / "events.jsonl", [started])
    row = ProcessRow(
        sleeper.pid,
        supervisor,
        "anna",
        True,
        "python -m trainfast_runner.running.supervision",
        0.0,
        MIB,
        5.0,
    )
    async with running(home, size=(120, 40)) as (app, pilot):
        await opened(pilot, the_machine(0, rows=(row,)))
        await pilot.press("x")
        await pilot.pause()
        text = screen_text(app)
        assert f"Stop the run {directory.name}?" in text
        assert f"Process {sleeper.pid} is its supervisor." in text
        assert "send SIGTERM" not in text
        await pilot.press("y")
        for thread in threading.enumerate():
            if thread.name == "trainfast-stop":
                thread.join(60)
        await pilot.pause()
        assert "The run was asked to stop." in screen_text(app)


async def test_what_is_not_ones_own_or_not_visible_is_refused_without_a_question(home: Home) -> None:
    own = ProcessRow(os.getpid(), identify(os.getpid()), "me", True, "trainfast-tui")
    for row, words in (
        (own, "press q to quit"),
        (ProcessRow(7, devices=((0, None),)), "not visible from here, so"),
    ):
        async with running(home, size=(120, 40)) as (app, pilot):
            await opened(pilot, the_machine(0, rows=(row,)))
            await pilot.press("x")
            await pilot.pause()
            assert words in screen_text(app)
            assert "send SIGTERM" not in screen_text(app)


async def test_a_process_is_not_ended_while_the_runs_cannot_be_read(
    home: Home, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Home) -> list[str]:
        raise UserError("the runs cannot be listed: no permission", key="TRAINFAST_HOME")

    row = ProcessRow(sleeper.pid, identify(sleeper.pid), "anna", True, "sleeper --long", 0.0, MIB, 5.0)
    async with running(home, size=(120, 40)) as (app, pilot):
        await opened(pilot, the_machine(0, rows=(row,)))
        monkeypatch.setattr(Home, "run_ids", refused)
        await pilot.press("x")
        await pilot.pause()
        assert "the runs cannot be listed: no permission" in screen_text(app)
        assert f"End process {sleeper.pid}?" not in screen_text(app)


async def test_gpus_of_a_process_that_are_not_next_to_each_other_are_counted(home: Home) -> None:
    places = {(1, 2): "GPU 1+2", (1, 2, 3): "GPU 1-3", (0, 2, 5): "3 GPUs"}
    rows = tuple(
        ProcessRow(4000 + at, devices=tuple((index, GIB) for index in indexes)) for at, indexes in enumerate(places)
    )
    async with running(home, size=(160, 48)) as (app, pilot):
        await opened(pilot, the_machine(rows=rows))
        for words, count in zip(places.values(), (2, 3, 3), strict=True):
            assert f"{words} {count}.00 GiB" in screen_text(app)


async def test_a_terminal_without_colours_shows_every_screen(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with running(home, size=(120, 40)) as (app, pilot):
        assert "throttled by heat" in await opened(pilot, the_machine())
        for screen in ("m", "h", "escape", "T", "escape", "question_mark"):
            await pilot.press(screen)
            await pilot.pause()
            # What goes to a real terminal passes through the filter that takes its colours away.
            for strip in app.screen._compositor.render_strips():
                strip.apply_filter(Monochrome(), app.screen.background_colors[1])
    assert app.return_code in (None, 0)


def test_the_reader_looks_at_processes_only_while_it_is_asked_to(home: Home) -> None:
    with_processes = threading.Event()
    without_processes = threading.Event()
    reader: Reader

    def post(snapshot: Snapshot) -> None:
        if snapshot.processes is not None:
            with_processes.set()
            reader.look_at_processes(False)
        elif with_processes.is_set():
            without_processes.set()

    reader = Reader(home, post)
    reader.look_at_processes(True)
    reader.start()
    try:
        assert with_processes.wait(60)
        assert without_processes.wait(60)
    finally:
        reader.stop()


async def test_what_a_process_calls_itself_is_text_and_nothing_else(home: Home) -> None:
    nasty = ProcessRow(4000, Identity(4000, 5), "ev\x1b[31mil", False, "\x1b]0;owned\x07[bold]x[/] \x1b[2Jpython", 1.0)
    async with running(home, size=(160, 48)) as (_, pilot):
        text = await opened(pilot, the_machine(1, rows=(nasty,)))
    assert "\x1b" not in text
    assert "evil" in text
    assert "[bold]x[/] python" in text
