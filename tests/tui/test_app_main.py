"""The main screen: what a person sees of a run."""

import re

import msgspec
import pytest
from msgspec.structs import replace
from recorded import START_NS, S, a_gpu, a_run, a_tick, with_end, write_lines
from still import FULL, SMALL, a_live_run, a_snapshot, has, lacks, running, shown

from on_disk import put
from trainfast_runner.machine.telemetry.binding import UNIFIED_MEMORY
from trainfast_runner.records.result import RunConditions, RunError
from trainfast_runner.records.run_directory import read_result
from trainfast_runner.records.run_lines import Event
from trainfast_runner.results.doubts import with_doubts
from trainfast_tui.control.messages import Notified, SnapshotTaken


async def test_an_absent_reading_is_absent_and_not_zero(home):
    tick = a_tick(20, gpus=1, live=False)
    dumb = a_gpu(0, temperature_c=None, power_w=None, power_limit_w=None, sm_clock_mhz=None, throttle_reasons=None)
    lost = a_gpu(1, error="the GPU has fallen off the bus")
    tick = msgspec.structs.replace(tick, devices=[dumb, lost])
    text, _ = await shown(home, a_snapshot(None, ticks=(tick,)))
    row = next(line for line in text.splitlines() if "GPU 0" in line)
    assert " 0 °C" not in row
    assert "–" in row
    assert "does not answer: the GPU has fallen off the bus" in text


async def test_a_gpu_that_shares_the_hosts_memory_says_so_where_its_own_would_stand(home):
    tick = a_tick(20, gpus=1, live=False)
    shared = a_gpu(0, memory_used_bytes=None, memory_total_bytes=None)
    mute = a_gpu(1, memory_used_bytes=None, memory_total_bytes=None, power_w=None, power_limit_w=None)
    missing = {"gpu0.memory_total_bytes": UNIFIED_MEMORY, "gpu1.memory_total_bytes": "not supported"}
    tick = msgspec.structs.replace(tick, devices=[shared, mute], missing=missing)
    for size in ((160, 48), SMALL):
        text, _ = await shown(home, a_snapshot(None, ticks=(tick,)), size=size)
        rows = [line for line in text.splitlines() if "GPU 0 " in line or "GPU 1 " in line]
        assert " shares" in rows[0]
        assert " unknown" in rows[1]
        assert not any("– of –" in row or "–/–" in row for row in rows)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("lost", "trainfast-tui doctor"),
        ("killed", "Its steps are kept"),
        ("stopped", "r runs again"),
        ("failed_to_start", "trainfast-tui doctor"),
    ],
)
async def test_every_end_says_why_and_what_to_try(home, state, words):
    text, _ = await shown(home, a_snapshot(a_run(home, state=state, reason="because of the test")))
    assert state.replace("_", " ") in text.lower()
    assert "because of the test" in text
    assert words in text


async def test_a_run_without_its_supervisor_says_so(home, hold):
    directory = a_run(home, with_result=False)
    hold(directory)
    write_lines(directory / "events.jsonl", [Event(t_ns=START_NS, kind="supervisor", pid=2**22 - 1, start_ticks=1)])
    text, _ = await shown(home, a_snapshot(directory, second=23), "s")
    has(text, "running without its supervisor", "has no supervisor any more", "y  stop them")


async def test_a_stop_counts_down_and_the_second_one_kills_at_once(home, hold):
    stop = Event(t_ns=START_NS + 20 * S, kind="stop_requested", deadline_ns=START_NS + 50 * S)
    stopping = Event(t_ns=START_NS + 20 * S, kind="state", state="stopping")
    directory = a_live_run(home, hold, stop, stopping)
    text, _ = await shown(home, a_snapshot(directory, second=23))
    assert "stopping: SIGKILL in 27 s" in text
    async with running(home, a_snapshot(directory, second=23)) as (app, pilot):
        stopped = []
        app.session.run_control.stop = lambda run, at_once=False: stopped.append((run, at_once))
        await pilot.press("s")
        assert stopped == [(directory, True)]


async def test_text_of_the_training_is_shown_as_text(home):
    evil = "\x1b[2J\x1b]0;owned\x07[bold red]not markup[/] \x1b[31mred\x1b[0m \x07bell [/nonsense]\n"
    error = RunError(rank=0, phase="forward", type="[b]Odd[/b]", message="\x1b[5mblink[/]")
    directory = a_run(home, state="failed", steps=2, reason="[link=x]\x1b[1mreason[/]", error=error, log=evil * 3)
    text, _ = await shown(home, a_snapshot(directory), "l")
    lacks(text, "\x1b", "\x07")
    has(text, "[bold red]not markup[/] red bell [/nonsense]", "[link=x]reason[/]")
    assert "owned" not in text


@pytest.mark.parametrize("keys", [(), ("m",), ("h",)])
async def test_a_long_notice_wraps_on_the_smallest_screen(home, keys):
    async with running(home, a_snapshot(a_run(home)), size=SMALL) as (_, pilot):
        await pilot.press(*keys)
        for words in (f"{'why ' * 40}and what to do", "in short"):
            text = await pilot.post(Notified(words))
            assert words in " ".join(text.split())
            assert "? help" in text.splitlines()[-1], "the footer keeps its row"


async def test_a_reading_error_leaves_other_notices_and_goes_with_its_cause(home):
    snapshot = a_snapshot(None)
    async with running(home) as (app, pilot):
        broken = SnapshotTaken(replace(snapshot, trouble="cannot read the run"))
        assert "cannot read the run" in await pilot.post(broken)
        app.post(Notified("Another notice."))
        assert "Another notice." in await pilot.post(broken)
        assert "Another notice." in await pilot.show(snapshot)
        app.post(broken)
        assert "cannot read" not in await pilot.show(snapshot)


@pytest.mark.parametrize("size", [FULL, SMALL])
async def test_a_run_measured_beside_others_ended_with_a_doubt(home, size):
    directory = with_end(a_run(home), conditions=RunConditions(others_cpu_percent=76.0))
    put(directory / "result.json", with_doubts(read_result(directory)))
    async with running(home, a_snapshot(directory), size=size) as (app, _):
        text = app.text
        assert {style.color.name for style in app.styles_of("? ")} == {"color(3)"}, "doubt is yellow"
    assert "✓" not in text
    assert "? finished" in text
    assert re.search(r"\? [\d.]+ samples/s", text)
    has(text, "doubtful", "The run shared the CPU")


async def test_a_key_charts_throughput_in_tokens_and_again_in_samples(home):
    def charted(text):
        return next(line for line in text.splitlines() if line.startswith("throughput"))

    async with running(home, a_snapshot(a_run(home))) as (app, pilot):
        assert " samples/s " in charted(app.text)
        assert " tokens/s " in charted(await pilot.press("t"))
        assert " samples/s " in charted(await pilot.press("t"))
