"""The monitor: the machine for a person about to train."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from monitored import a_full_tick, opened, the_machine
from msgspec.structs import replace
from recorded import GIB, RAMP, START_NS, S, a_gpu, a_ramp_tick, a_run, write_lines
from still import StillApp, a_snapshot, own_supervisor, running, screen_text
from textual.pilot import Pilot

from trainfast_runner.machine.process_list import ProcessRow
from trainfast_runner.machine.processes import Identity
from trainfast_runner.machine.telemetry import binding
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_lines import Event
from trainfast_tui.control.messages import SnapshotTaken
from trainfast_tui.live.reader import Reader
from trainfast_tui.live.snapshot import Snapshot

SnapCompare = Callable[..., bool]


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
    why = binding.device_failure(binding.GPU_IS_LOST, "")
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
            styles = [style for strip in app.screen._compositor.render_strips() for _, style, _ in strip if style]
            assert not any(style.color or style.bgcolor for style in styles)
            assert {(True, False), (False, True)} <= {(bool(style.bold), bool(style.dim)) for style in styles}
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
