"""The monitor and the topology: the machine for a person about to train."""

import threading

import msgspec
import pytest
import stand_in
from msgspec.structs import replace
from recorded import RAMP, START_NS, S, a_full_tick, a_gpu, a_ramp_tick, a_run, a_tick, write_lines
from stand_in import Gpu, Machine
from still import a_live_run, a_snapshot, has, running, the_machine

from trainfast_runner.machine.processes import Identity, ProcessRow
from trainfast_runner.machine.telemetry.binding import library_failure
from trainfast_runner.machine.telemetry.topology import read_topology
from trainfast_tui.live.reader import Reader
from trainfast_tui.text.topology import peer_lines, silent_lines


async def test_without_a_gpu_the_cpu_is_the_device_and_the_reason_is_shown(home):
    async with running(home, ascii=True, size=(80, 24)) as (app, pilot):
        text = await pilot.monitor(the_machine(0))
        assert not app.session.background.is_shown
        words = " ".join(text.split())
        has(words, "no GPU: no NVIDIA driver here: libnvidia-ml.so.1 was not found")
        has(words, "Runs use the CPU; with an NVIDIA card in this machine they need devices=cpu.")
        assert "CPU of all cores" in text
        assert "GPU memory" not in text
        assert text.isascii()
        first = next(line for line in text.splitlines() if line.startswith("> "))
        assert "4004" in first, "the busiest comes first"
        assert "owner^" in await pilot.press(*"oooo")
        assert "No run yet" in await pilot.press("m")
        assert app.session.background.is_shown


async def test_the_next_reading_is_charted_on_a_small_screen_beside_the_notice_of_its_key(home):
    async with running(home, size=(80, 24)) as (_, pilot):
        await pilot.monitor(the_machine(0))
        text = await pilot.press("n")
        has(text, "first reading: memory", "B ┤")


async def test_a_lost_gpu_says_since_when_and_the_others_go_on(home):
    ticks = [a_full_tick(second, 2) for second in range(80)]
    for second in range(60, 80):
        gone = a_gpu(1, error="GPU is lost", throttle_reasons=None)
        ticks[second] = replace(ticks[second], devices=[ticks[second].devices[0], gone])
    async with running(home, size=(140, 40)) as (_, pilot):
        text = await pilot.monitor(replace(the_machine(2), ticks=tuple(ticks)))
        has(text, "does not answer: GPU is lost", "GPU 1 does not answer")
        has(text, "61.0 GiB of 139 GiB")
        assert "does not answer: GPU is lost" in await pilot.press("m"), "on the main screen as well"


async def test_charts_are_drawn_anew_when_they_move_by_a_cell(home):
    """Drawing them is most of what a frame costs; the row of the GPU has its newest reading at once."""
    # A cell of this axis is 0.93 s long, and this moment a third into one.
    seen = replace(the_machine(1), taken_ns=START_NS + 80 * S + S * 3 // 10)
    hotter = replace(
        seen.ticks[-1], t_ns=seen.taken_ns, devices=[a_gpu(0, gpu_utilization_percent=17, t_ns=seen.taken_ns)]
    )
    async with running(home, size=(140, 40)) as (app, pilot):
        await pilot.monitor(seen)
        for later_s, in_chart in ((0.2, False), (2.3, True)):
            now = replace(seen, taken_ns=seen.taken_ns + int(later_s * S), ticks=(*seen.ticks, hotter))
            await pilot.show(now)
            row, chart = (next(line for line in app.text.splitlines() if of in line) for of in ("GPU 0", "GPU u"))
            assert "17 %" in row
            assert ("17 %" in chart) == in_chart


async def test_while_a_run_is_live_its_samples_are_shown(home, hold):
    directory = a_live_run(home, hold)
    write_lines(directory / "telemetry.jsonl", [a_ramp_tick(second) for second in range(RAMP.stop)])
    async with running(home, size=(140, 40)) as (_, pilot):
        text = await pilot.monitor(a_snapshot(directory, second=RAMP.stop))
        has(text, "T GPU 0 throttled by heat", "looking at the processes")


async def test_a_terminal_without_colours_shows_every_screen(home, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    async with running(home, size=(120, 40)) as (app, pilot):
        assert "throttled by heat" in await pilot.monitor(the_machine())
        for screen in ("m", "h", "escape", "T", "escape", "question_mark"):
            await pilot.press(screen)
            styles = [style for strip in app.screen._compositor.render_strips() for _, style, _ in strip if style]
            assert not any(style.color or style.bgcolor for style in styles)
            assert {(True, False), (False, True)} <= {(bool(style.bold), bool(style.dim)) for style in styles}
    assert app.return_code in (None, 0)


def test_the_reader_looks_at_processes_only_while_it_is_asked_to(home):
    with_processes = threading.Event()
    without_processes = threading.Event()
    reader: Reader

    def post(snapshot):
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


async def test_what_a_process_calls_itself_is_text_and_nothing_else(home):
    nasty = ProcessRow(4000, Identity(4000, 5), "ev\x1b[31mil", False, "\x1b]0;owned\x07[bold]x[/] \x1b[2Jpython", 1.0)
    async with running(home, size=(160, 48)) as (_, pilot):
        text = await pilot.monitor(the_machine(1, rows=(nasty,)))
    assert "\x1b" not in text
    has(text, "evil", "[bold]x[/] python")


async def seen(home, run, missing, *keys, gpus=0):
    tick = msgspec.structs.replace(a_tick(20, gpus=gpus, live=False), missing=missing)
    async with running(home, size=(160, 48)) as (app, pilot):
        snapshot = a_snapshot(run, ticks=(tick,))
        await pilot.show(snapshot)
        for key in keys:
            await pilot.press(key)
            await pilot.show(snapshot)
        return " ".join(app.text.split())


@pytest.mark.parametrize(("code", "cure"), [(18, "reboot, or reload the nvidia kernel modules"), (4, "/dev/nvidia*")])
async def test_the_cure_is_on_both_screens(home, code, cure):
    run, missing = a_run(home), {"nvml": library_failure(code, "its name").sentence}
    main = await seen(home, run, missing)
    assert "no GPU: " in main
    assert missing["nvml"][:60] in main
    assert cure in await seen(home, run, missing, "m")


async def test_no_driver_at_all_is_no_trouble(home):
    main = await seen(home, a_run(home), {"nvml": library_failure(12, "its name").sentence})
    assert "no GPU" in main
    assert "libnvidia-ml" not in main


ISLANDS = Machine(
    [
        Gpu(
            uuid=f"GPU-{index}",
            bus=index,
            node=index // 4,
            links=tuple(b for b in range(8) if b != index and b // 4 == index // 4),
        )
        for index in range(8)
    ]
)


async def opened(home, machine, size, **options):
    with stand_in.installed(machine):
        async with running(home, size=size, **options) as (app, pilot):
            await pilot.show(a_snapshot(a_run(home)))
            await pilot.press("T")

            def is_shown():
                text = app.text
                return "Asking the driver" not in text and ("for training" in text or size[1] <= 40)

            await pilot.until_true(is_shown, "the topology")
            text = app.text
            assert "next run" in await pilot.press("T"), "the same key leads back"
            return text


async def test_the_matrix_and_what_it_means(home):
    text = await opened(home, ISLANDS, (120, 48))
    row = next(line for line in text.splitlines() if line.startswith("GPU5"))
    assert row.split() == ["GPU5", *["SYS"] * 4, "NV1", "X", "NV1", "NV1"]
    has(text, "NV#   over # bonded NVLinks", "pp across the groups sends the least")
    assert "o back" not in text, "Esc is the key that the footer shows"


async def test_it_fits_the_smallest_terminal_and_ascii(home):
    text = await opened(home, ISLANDS, (80, 24), ascii=True)
    assert text.isascii()
    assert "GPU7" in text


def test_a_gpu_that_does_not_answer_is_shown_whole_and_claimed_for_nothing():
    lost = Gpu(uuid="GPU-2", bus=2)
    lost.lost = (0.0, 9.0)
    with stand_in.installed(Machine([Gpu(uuid="GPU-0"), Gpu(uuid="GPU-1", bus=1), lost])):
        topology = read_topology()
    assert peer_lines(topology) == ["Every GPU that answers can read every other one's memory."]
    assert silent_lines(topology) == [f"GPU2 does not answer: {topology.devices[2].error}"]
    assert silent_lines(topology)[0].endswith("a reboot usually brings it back")


async def test_without_a_gpu_it_says_why(home):
    assert "No GPU to show" in await opened(home, Machine([]), (80, 48))
