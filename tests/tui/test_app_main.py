"""The main screen: what a person sees of a run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from recorded import OOM_WORDS, START_NS, S, a_gpu, a_run, a_tick, an_oom_run, write_lines
from still import FULL, SMALL, a_live_run, a_snapshot, running, screen_text, shown

from trainfast_runner.machine.telemetry.binding import UNIFIED_MEMORY
from trainfast_runner.records.home import Home
from trainfast_runner.records.result import RunError
from trainfast_runner.records.result_conditions import RunConditions
from trainfast_runner.records.run_directory import read_result
from trainfast_runner.records.run_lines import Event
from trainfast_runner.results.doubts import with_doubts
from trainfast_tui.control.messages import Notified, SnapshotTaken


async def test_a_live_run_shows_where_it_is_and_how_fast(home: Home, hold: Callable[[Path], None]) -> None:
    text, _ = await shown(home, a_snapshot(a_live_run(home, hold), second=23))
    assert "● running  20261121-054455-tiny-llama-7f3a" in text
    assert "step 30 of 50" in text
    assert "9.6 s left" in text
    assert "16.6 samples/s" in text or "16.7 samples/s" in text
    assert "medians of the last 20 steps" in text
    assert "loss 8.0" in text
    assert "peak allocated 412 MiB" in text
    for phase in ("data", "forward", "backward", "optimizer", "other"):
        assert f"{phase} " in text.splitlines()[-3]
    assert "this run" in text


async def test_an_ended_run_shows_the_figures_of_its_result(home: Home) -> None:
    text, _ = await shown(home, a_snapshot(a_run(home)))
    assert "✓ finished" in text
    assert "medians of 27 steps" in text
    assert "loss 8.10 → 5.70" in text
    assert "c compares with the run before" in text


async def test_eight_gpus_have_a_row_each_with_throttling_in_words(home: Home, hold: Callable[[Path], None]) -> None:
    directory = a_live_run(home, hold, gpus=8)
    text, _ = await shown(home, a_snapshot(directory, second=23))
    rows = [line for line in text.splitlines() if "▸GPU" in line]
    assert len(rows) == 8
    assert "64.0 GiB of 139 GiB" in rows[3]
    assert "89 °C 2 below slowdown" in rows[3]
    assert "thermal slowdown (software)" in rows[3]
    assert "at the power limit" in rows[1]
    assert "/700 W" in rows[0]
    assert "SM 1830/1980 MHz" in rows[0]
    assert "highest of 8 GPUs" in text
    narrow, _ = await shown(home, a_snapshot(directory, second=23), size=SMALL)
    assert "thermal slowdown" in narrow
    assert "power limit" in narrow


async def test_an_absent_reading_is_absent_and_not_zero(home: Home) -> None:
    tick = a_tick(20, gpus=1, live=False)
    dumb = a_gpu(0, temperature_c=None, power_w=None, power_limit_w=None, sm_clock_mhz=None, throttle_reasons=None)
    lost = a_gpu(1, error="the GPU has fallen off the bus")
    tick = msgspec.structs.replace(tick, devices=[dumb, lost])
    text, _ = await shown(home, a_snapshot(None, ticks=(tick,)))
    row = next(line for line in text.splitlines() if "GPU 0" in line)
    assert " 0 °C" not in row
    assert "–" in row
    assert "not answering: the GPU has fallen off the bus" in text


async def test_a_gpu_that_shares_the_hosts_memory_says_so_where_its_own_would_stand(home: Home) -> None:
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


async def test_the_first_start_says_what_to_press(home: Home) -> None:
    text, _ = await shown(home, a_snapshot(None))
    assert "No run yet." in text
    assert "r    train tiny-llama for a few seconds" in text
    assert "samples/s" not in text
    small, _ = await shown(home, a_snapshot(None), size=SMALL)
    assert "No run yet." in small
    assert "q    leave" in small


async def test_out_of_memory_stands_in_the_middle_with_three_changes(home: Home) -> None:
    text, app = await shown(home, a_snapshot(an_oom_run(home)), "3", size=SMALL)
    assert "OUT OF MEMORY IN FORWARD AT STEP 1" in text
    assert "DefaultCPUAllocator: can't allocate memory" in text
    reason = " ".join(" ".join(line.split("│")[0] for line in text.splitlines()).split())
    assert "allocate 6442450944 bytes (6.00 GiB). Error code 12" in reason
    assert "The limit was 1.00 GiB a rank." in reason
    for change in (" 1 batch_size = 512", " 2 precision = bf16", " 3 checkpointing = full"):
        assert change in text
    assert app.session.next_run is not None
    assert app.session.next_run.spec.knobs["checkpointing"] == "full", "the key of a change sets the knob"
    assert "checkpointing = full; r runs it" in text
    assert OOM_WORDS.startswith("Default")


async def test_a_failed_run_says_rank_phase_message_and_last_words(home: Home) -> None:
    error = RunError(rank=0, phase="backward", type="ValueError", message="no gradient for wte")
    directory = a_run(
        home, state="failed", steps=4, reason="ValueError: no gradient for wte", error=error, log="one\ntwo\nthree\n"
    )
    text, _ = await shown(home, a_snapshot(directory))
    assert "FAILED IN BACKWARD AT STEP 5" in text
    assert "ValueError: no gradient for wte" in text
    assert "│ three" in text
    assert "l shows the whole log" in text


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("lost", "trainfast-tui doctor"),
        ("killed", "Its steps are kept"),
        ("stopped", "r runs again"),
        ("failed_to_start", "trainfast-tui doctor"),
    ],
)
async def test_every_end_says_why_and_what_to_try(home: Home, state: str, words: str) -> None:
    text, _ = await shown(home, a_snapshot(a_run(home, state=state, reason="because of the test")))
    assert state.replace("_", " ") in text.lower()
    assert "because of the test" in text
    assert words in text


async def test_a_run_without_its_supervisor_says_so(home: Home, hold: Callable[[Path], None]) -> None:
    directory = a_run(home, with_result=False)
    hold(directory)
    write_lines(directory / "events.jsonl", [Event(t_ns=START_NS, kind="supervisor", pid=2**22 - 1, start_ticks=1)])
    text, _ = await shown(home, a_snapshot(directory, second=23), "s")
    assert "running without its supervisor" in text
    assert "has no supervisor any more" in text
    assert "y  stop them" in text


async def test_a_stop_counts_down_and_the_second_one_asks_to_kill(home: Home, hold: Callable[[Path], None]) -> None:
    stop = Event(t_ns=START_NS + 20 * S, kind="stop_requested", deadline_ns=START_NS + 50 * S)
    stopping = Event(t_ns=START_NS + 20 * S, kind="state", state="stopping")
    directory = a_live_run(home, hold, stop, stopping)
    text, _ = await shown(home, a_snapshot(directory, second=23))
    assert "stopping: SIGKILL in 27 s" in text
    text, _ = await shown(home, a_snapshot(directory, second=23), "s")
    assert "Kill 20261121-054455-tiny-llama-7f3a now?" in text


async def test_running_while_one_is_live_offers_to_stop_it_first(home: Home, hold: Callable[[Path], None]) -> None:
    text, _ = await shown(home, a_snapshot(a_live_run(home, hold), second=23), "r")
    assert "is running, at step 30" in text
    assert "y  stop it, then run" in text


async def test_text_of_the_training_is_shown_as_text(home: Home) -> None:
    evil = "\x1b[2J\x1b]0;owned\x07[bold red]not markup[/] \x1b[31mred\x1b[0m \x07bell [/nonsense]\n"
    error = RunError(rank=0, phase="forward", type="[b]Odd[/b]", message="\x1b[5mblink[/]")
    directory = a_run(home, state="failed", steps=2, reason="[link=x]\x1b[1mreason[/]", error=error, log=evil * 3)
    text, _ = await shown(home, a_snapshot(directory), "l")
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[bold red]not markup[/] red bell [/nonsense]" in text
    assert "[link=x]reason[/]" in text
    assert "owned" not in text


async def test_synthetic_data_is_shown_wherever_its_figures_are(home: Home) -> None:
    text, _ = await shown(home, a_snapshot(a_run(home, synthetic=True)))
    assert text.count("synthetic data") >= 3, "in the header, over the chart and beside the figures"


async def test_a_terminal_too_small_still_shows_the_essentials(home: Home, hold: Callable[[Path], None]) -> None:
    text, _ = await shown(home, a_snapshot(a_live_run(home, hold), second=23), size=(60, 20))
    assert "Needs 80x24; this terminal is 60x20." in text
    for essential in ("● running", "step 30 of 50", "samples/s", "peak allocated 412 MiB", "q quit"):
        assert essential in text
    assert "batch_size" not in text


async def test_few_measured_steps_are_shown_to_be_few(home: Home) -> None:
    one, _ = await shown(home, a_snapshot(a_run(home, "20261121-000000-tiny-llama-0001", steps=4)))
    assert "few steps: only 1 measured" in one
    two, _ = await shown(home, a_snapshot(a_run(home, "20261121-000000-tiny-llama-0002", steps=5)))
    assert "few steps: medians of 2 steps" in two


async def test_a_run_without_a_step_promises_none_and_shows_its_last_memory(home: Home) -> None:
    import msgspec

    directory = a_run(home, state="stopped", steps=0, reason="stopped after 0 steps", log="")
    gone = a_tick(9)
    run = msgspec.structs.replace(gone.host.run, memory_rss_bytes=0, processes=0)  # type: ignore[type-var]
    with (directory / "telemetry.jsonl").open("ab") as file:
        gone = msgspec.structs.replace(gone, host=msgspec.structs.replace(gone.host, run=run))
        file.write(msgspec.json.encode(gone) + b"\n")
    text, _ = await shown(home, a_snapshot(directory), "l")
    assert "Its steps are kept" not in text
    assert "No step was completed." in text
    assert "process memory 492 MiB" in text
    assert text.splitlines()[-3].startswith("The training printed nothing."), "an empty log takes two lines"


async def test_on_the_smallest_screen_phases_have_their_unit_and_keys_one_row(
    home: Home, hold: Callable[[Path], None]
) -> None:
    directory = a_live_run(home, hold)
    text, _ = await shown(home, a_snapshot(directory, second=23), size=SMALL)
    assert "▓ back 249 ms" in text
    assert "other 19.1 ms" in text
    assert "step 30 of 50 █████████" in text
    tiny, _ = await shown(home, a_snapshot(directory, second=23), size=(60, 20))
    assert tiny.count("q quit") == 1


@pytest.mark.parametrize("keys", [(), ("m",), ("h",)])
async def test_a_long_notice_wraps_on_the_smallest_screen(home: Home, keys: tuple[str, ...]) -> None:
    async with running(home, size=SMALL) as (app, pilot):
        app.post(SnapshotTaken(a_snapshot(a_run(home))))
        await pilot.press(*keys)
        for words in (f"{'why ' * 40}and what to do", "in short"):
            app.post(Notified(words))
            await pilot.pause()
            text = screen_text(app)
            assert words in " ".join(text.split())
            assert "q quit" in text.splitlines()[-1], "the footer keeps its row"


async def test_the_cpu_keeps_its_last_figure_until_the_next(home: Home) -> None:
    import msgspec

    tick = a_tick(20, live=False)
    blank = msgspec.structs.replace(tick, host=msgspec.structs.replace(tick.host, cpu_percent=None))
    async with running(home, size=FULL) as (app, pilot):
        for ticks in ((tick,), (tick, blank)):
            app.post(SnapshotTaken(a_snapshot(None, ticks=ticks)))
            await pilot.pause()
        row = next(line for line in screen_text(app).splitlines() if line.startswith("CPU"))
        assert "–" not in row
        assert " 99 %" in row


async def test_a_reading_error_leaves_other_notices_and_goes_with_its_cause(home: Home) -> None:
    snapshot = a_snapshot(None)
    async with running(home, size=FULL) as (app, pilot):
        broken = SnapshotTaken(replace(snapshot, trouble="cannot read the run"))
        app.post(broken)
        await pilot.pause()
        assert "cannot read the run" in screen_text(app)
        app.post(Notified("Another notice."))
        app.post(broken)
        await pilot.pause()
        assert "Another notice." in screen_text(app)
        app.post(SnapshotTaken(snapshot))
        await pilot.pause()
        assert "Another notice." in screen_text(app)
        app.post(broken)
        app.post(SnapshotTaken(snapshot))
        await pilot.pause()
        assert "cannot read" not in screen_text(app)


@pytest.mark.parametrize("size", [FULL, SMALL])
async def test_a_run_measured_beside_others_ended_with_a_doubt(home: Home, size: tuple[int, int]) -> None:
    directory = a_run(home)
    result = read_result(directory)
    assert result is not None
    busy = with_doubts(replace(result, conditions=RunConditions(others_cpu_percent=76.0)))
    (directory / "result.json").write_bytes(msgspec.json.encode(busy))
    text, _ = await shown(home, a_snapshot(directory), size=size)
    assert "✓" not in text
    assert "? finished" in text
    assert re.search(r"\? [\d.]+ samples/s", text)
    assert "doubtful" in text
    assert "The run shared the CPU" in text
