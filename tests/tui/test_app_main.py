"""The main screen: what a person sees of a run, and what the keys do to the next one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recorded import GIB, OOM_WORDS, START_NS, S, a_run, a_tick, an_oom_run, write_lines
from still import StillApp, a_snapshot, own_supervisor, screen_text
from textual.events import Key
from textual.pilot import Pilot

from trainfast_runner.advisor import Measured, Situation
from trainfast_runner.home import Home
from trainfast_runner.knob_values import Choice
from trainfast_runner.knobs import BY_NAME
from trainfast_runner.machine import Machine
from trainfast_runner.problem import Problem
from trainfast_runner.records import Clock, Event, RunError, RunFile
from trainfast_runner.situation import gather
from trainfast_tui.messages import Refused, SituationSeen, SnapshotTaken
from trainfast_tui.next_run import of_preset, of_run
from trainfast_tui.preset_list import choices
from trainfast_tui.snapshot import Snapshot
from trainfast_tui.widgets.knob_panel import KnobPanel

FULL, SMALL = (160, 48), (80, 24)


async def shown(
    home: Home, snapshot: Snapshot, *keys: str, size: tuple[int, int] = FULL, **options: Any
) -> tuple[str, StillApp]:
    """The screen's text with this snapshot and after these keys."""
    app = StillApp(home, **options)
    async with app.run_test(size=size) as pilot:
        app.post_message(SnapshotTaken(snapshot))
        await pilot.pause()
        for key in keys:
            await pilot.press(key)
            await pilot.pause()
        return screen_text(app), app


def a_live_run(home: Home, hold: Callable[[Path], None], *events: Event, **options: Any) -> Path:
    """A run with a supervisor, in the middle of its steps."""
    directory = a_run(home, with_result=False, **options)
    hold(directory)
    running = Event(t_ns=START_NS + S, kind="state", state="running")
    write_lines(directory / "events.jsonl", [own_supervisor(), running, *events])
    return directory


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
    from recorded import a_gpu

    tick = a_tick(20, gpus=1, live=False)
    dumb = a_gpu(0, temperature_c=None, power_w=None, power_limit_w=None, sm_clock_mhz=None, throttle_reasons=None)
    lost = a_gpu(1, error="the GPU has fallen off the bus")
    import msgspec

    tick = msgspec.structs.replace(tick, devices=[dumb, lost])
    text, _ = await shown(home, a_snapshot(None, ticks=(tick,)))
    row = next(line for line in text.splitlines() if "GPU 0" in line)
    assert " 0 °C" not in row
    assert "–" in row
    assert "not answering: the GPU has fallen off the bus" in text


async def test_the_next_run_of_an_old_record_that_says_nothing_of_its_data(home: Home) -> None:
    old = RunFile(run_id="20250101-000000-old-0000", preset="tiny-llama", clock=Clock(monotonic_ns=0, wall_ns=0))
    spec = of_run(old).spec
    assert spec.data == {"kind": "text", "objective": "causal-lm"}
    assert gather(spec, Machine(device="cpu", gpus=(), nvml_gpus=(), cores=2), home).measured == ()


async def test_the_first_start_says_what_to_press(home: Home) -> None:
    text, _ = await shown(home, a_snapshot(None))
    assert "No run yet." in text
    assert "r    train tiny-llama for a few seconds" in text
    assert "samples/s" not in text
    small, _ = await shown(home, a_snapshot(None), size=SMALL)
    assert "No run yet." in small
    assert "q    leave" in small


async def test_out_of_memory_stands_in_the_middle_with_three_cures(home: Home) -> None:
    text, app = await shown(home, a_snapshot(an_oom_run(home)), "3", size=SMALL)
    assert "OUT OF MEMORY IN FORWARD AT STEP 1" in text
    assert "DefaultCPUAllocator: can't allocate memory" in text
    assert "The limit was 1.00" in text
    for cure in (" 1 batch_size = ", " 2 optimizer = ", " 3 optimizer = adafactor"):
        assert cure in text
    assert app.next_run is not None
    assert app.next_run.spec.knobs["optimizer"] == "adafactor", "the key of a cure sets the knob"
    assert "optimizer = adafactor; r runs it" in text
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


async def test_a_turned_knob_is_marked_and_counts_in_the_global_batch(home: Home) -> None:
    text, app = await shown(home, a_snapshot(a_run(home)), "right", "down", "right", "right")
    assert "•batch_size     16  was 8" in text
    assert "▸•grad_accum     4  was 1" in text
    assert "global batch 64 = 16 x 4 x 1 rank" in text
    assert "20-30 % faster than stepping" in text, "the trade-off of the knob under the cursor"
    assert app.next_run is not None
    assert app.next_run.spec.changed == ("batch_size", "grad_accum")


async def test_strategy_ddp_counts_every_rank(home: Home) -> None:
    app = StillApp(home)
    async with app.run_test(size=FULL) as pilot:
        app.post_message(SnapshotTaken(a_snapshot(None)))
        await pilot.pause()
        app.main.query_one(KnobPanel).move_to("strategy")
        assert app.next_run is not None
        app.main.change(app.next_run.type("strategy", "ddp"))
        await pilot.pause()
        assert "global batch 16 = 8 x 1 x 2 ranks" in screen_text(app)
        values = BY_NAME["strategy"].values
        assert isinstance(values, Choice)
        app.main.change(app.next_run.type("strategy", values.working[-1]))
        await pilot.press("space")
        assert app.next_run.spec.knobs["strategy"] == "single", "space goes on at the first value"


async def test_only_knobs_that_matter_to_the_strategy_are_listed(home: Home) -> None:
    app = StillApp(home)
    async with app.run_test(size=FULL) as pilot:
        app.post_message(SnapshotTaken(a_snapshot(None)))
        await pilot.pause()
        assert "pp_schedule" not in screen_text(app)
        assert app.next_run is not None
        app.main.change(app.next_run.type("strategy", "pp").type("pp_schedule", "1f1b"))
        app.main.query_one(KnobPanel).move_to("pp_schedule")
        await pilot.pause()
        assert "▸•pp_schedule" in screen_text(app)
        app.main.change(app.next_run.type("strategy", "single"))
        await pilot.pause()
        text = screen_text(app)
        assert "pp_schedule" not in text
        assert "▸•strategy" in text or "▸ strategy" in text, "the cursor goes to the nearest knob above"
        assert "pp_schedule" not in app.next_run.spec.changed, "what cannot be seen is not refused at the next start"


async def test_a_refusal_about_an_unlisted_knob_still_reaches_the_screen(home: Home) -> None:
    app = StillApp(home)
    async with app.run_test(size=FULL) as pilot:
        app.post_message(SnapshotTaken(a_snapshot(None)))
        await pilot.pause()
        app.post_message(Refused(Problem("pp_degree=9: there are 4 layers", key="pp_degree", advice="pp_degree=4")))
        await pilot.pause()
        app.post_message(SituationSeen(Situation()))
        await pilot.pause()
        text = screen_text(app)
        assert "Refused: pp_degree=9: there are 4 layers; try" in text
        assert text.count("pp_degree=9: there are 4 layers; try pp_degree=4") == 1, "in the status line, in one piece"


async def test_advice_stands_beside_its_knob(home: Home) -> None:
    app = StillApp(home)
    async with app.run_test(size=FULL) as pilot:
        app.post_message(SnapshotTaken(a_snapshot(a_run(home))))
        await pilot.pause()
        assert "advice" not in screen_text(app), "nothing to say about a batch of 8 on a CPU"
        await pilot.press("right")
        panel = app.main.query_one(KnobPanel)
        panel.move_to("lr")
        await pilot.pause()
        assert "advice lr=0.002: the global batch is 16, 2 x" in screen_text(app)
        fitted = Measured("run-7", {"strategy": "single", "batch_size": 64}, "finished", 40.0)
        app.post_message(SituationSeen(Situation(measured=(fitted,))))
        panel.move_to("grad_accum")
        await pilot.press("right", "right")
        await pilot.pause()
        assert "(run-7)" in screen_text(app)


async def test_a_typed_value_is_checked_before_it_is_taken(home: Home) -> None:
    app = StillApp(home)
    async with app.run_test(size=SMALL) as pilot:
        app.post_message(SnapshotTaken(a_snapshot(a_run(home))))
        await pilot.pause()
        app.main.query_one(KnobPanel).move_to("attention")
        await pilot.press("enter", *"dense", "enter")
        await pilot.pause()
        assert "'dense' is not one of its values (allowed: eager, sdpa, flash)" in " ".join(
            screen_text(app).replace("│", " ").split()
        )
        await pilot.press("ctrl+u", *"eager", "enter")
        await pilot.pause()
        assert app.next_run is not None
        assert app.next_run.spec.knobs["attention"] == "eager"
        await pilot.press("backspace")
        assert app.next_run.spec.knobs["attention"] == "sdpa"


async def burst(pilot: Pilot[Any], knob: str, value: object, *keys: str) -> None:
    """Keys that arrive in one read, as they do over a slow link, until they have set the knob."""
    app = pilot.app
    assert isinstance(app, StillApp)
    for key in keys:
        app.post_message(Key(key, key if len(key) == 1 else {"enter": "\r"}.get(key)))
    for _ in range(200):
        await pilot.pause()
        assert app.next_run is not None
        if app.next_run.spec.knobs[knob] == value and app.screen is app.main:
            return
    pytest.fail(f"{keys} left {knob} at {app.next_run.shown(knob)} and this screen:\n{screen_text(app)}")


async def test_what_is_typed_ahead_of_a_dialog_lands_in_it(home: Home) -> None:
    app = StillApp(home)
    async with app.run_test(size=SMALL) as pilot:
        app.post_message(SnapshotTaken(a_snapshot(a_run(home))))
        await pilot.pause()
        # What comes after Enter is for the screen below; a refused text is mended by what follows it.
        await burst(pilot, "grad_accum", 4, "enter", "3", "2", "enter", "down", "enter", "4", "enter")
        assert app.next_run is not None
        assert app.next_run.spec.knobs["batch_size"] == 32
        await burst(pilot, "grad_accum", 6, "enter", "x", "enter", "backspace", "6", "enter")
        await burst(pilot, "batch_size", of_preset(choices()[0][0]).spec.knobs["batch_size"], "p", "home", "enter")
        assert app.next_run.spec.preset == choices()[0][0]


async def test_the_preset_picker_takes_a_variant(home: Home) -> None:
    app = StillApp(home)
    async with app.run_test(size=SMALL) as pilot:
        app.post_message(SnapshotTaken(a_snapshot(None)))
        await pilot.pause()
        await pilot.press("p")
        await pilot.pause()
        await pilot.press("home", *["down"] * 5, "enter")
        await pilot.pause()
        assert app.next_run is not None
        assert app.next_run.spec.variant is not None
        assert f"preset {app.next_run.spec.name}"[:28] in screen_text(app)


async def test_saving_writes_a_preset_and_refuses_a_bad_name(home: Home, tmp_path: Path) -> None:
    app = StillApp(home)
    async with app.run_test(size=FULL) as pilot:
        app.post_message(SnapshotTaken(a_snapshot(None)))
        await pilot.pause()
        await pilot.press("right", "w")
        await pilot.pause()
        await pilot.press(*"a/b", "enter")
        await pilot.pause()
        assert "cannot name a preset" in screen_text(app)
        await pilot.press("ctrl+u", *"mine", "enter")
        await pilot.pause()
        saved = tmp_path / "config" / "trainfast-tui" / "presets" / "mine.toml"
        assert "batch_size = 16" in saved.read_text()
        assert "# a transformers model_type" in saved.read_text(), "comments stay"


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


async def test_the_log_opens_closes_and_scrolls(home: Home) -> None:
    log = "".join(f"line {number}\n" for number in range(100)) + "10 %\r50 %\r100 %\n"
    snapshot = a_snapshot(a_run(home, log=log))
    text, _ = await shown(home, snapshot, "l")
    assert "log ──" in text
    assert "\n100 %" in text, "of a progress bar only the last state is kept"
    assert "line 99" in text
    back, _ = await shown(home, snapshot, "l", "pageup")
    assert "line 99" not in back
    assert "lines back" in back
    closed, _ = await shown(home, snapshot, "l", "l")
    assert "line 99" not in closed


async def test_synthetic_data_is_said_wherever_its_figures_are(home: Home) -> None:
    text, _ = await shown(home, a_snapshot(a_run(home, synthetic=True)))
    assert text.count("synthetic data") >= 3, "in the header, over the chart and beside the figures"


async def test_a_terminal_too_small_still_shows_the_essentials(home: Home, hold: Callable[[Path], None]) -> None:
    text, _ = await shown(home, a_snapshot(a_live_run(home, hold), second=23), size=(60, 20))
    assert "This terminal is 60x20; the screen needs 80x24." in text
    for essential in ("● running", "step 30 of 50", "samples/s", "peak allocated 412 MiB", "q quit"):
        assert essential in text
    assert "batch_size" not in text


async def test_every_theme_can_be_turned_to_and_back(home: Home) -> None:
    app = StillApp(home)
    async with app.run_test(size=FULL) as pilot:
        app.post_message(SnapshotTaken(a_snapshot(a_run(home))))
        await pilot.pause()
        for name in ("terminal-light", "textual-dark", "textual-light", "terminal-dark"):
            await pilot.press("f2")
            # At once, while the style sheet may still be the old theme's.
            assert "finished" in screen_text(app)
            await pilot.pause()
            assert f"theme: {name}" in screen_text(app)
        for name in ("textual-dark", "terminal-dark", "textual-light"):
            app.theme = name
            assert "finished" in screen_text(app)
            await pilot.pause()


async def test_ascii_is_only_ascii(home: Home) -> None:
    snapshot = a_snapshot(a_run(home, gpus=4), ticks=(a_tick(20, gpus=4),))
    for keys in ((), ("enter",), ("question_mark",), ("p",)):
        text, _ = await shown(home, snapshot, *keys, ascii=True, size=(100, 30))
        assert text.isascii(), {character for character in text if ord(character) > 127}


async def test_every_key_stands_in_the_help(home: Home) -> None:
    from trainfast_tui.commands import COMMANDS
    from trainfast_tui.screens.help import help_lines

    text = "\n".join("".join(piece for piece, _ in line) for line in help_lines(100))
    for command in COMMANDS:
        assert command.scope == "help" or command.help[:40] in text
    for name in ("batch_size", "watch", "grad_clip"):
        assert name in text
    seen, _ = await shown(home, a_snapshot(None), "question_mark", size=SMALL)
    assert "keys on the main screen" in seen
    rules = [line[0][0] for line in help_lines(100, "monitor") if line and line[0][0].startswith("keys ")]
    assert "in the monitor" in rules[0], "the keys of where it was asked come first"


def test_each_command_has_its_own_key_and_a_method() -> None:
    from trainfast_tui.app import TrainfastApp
    from trainfast_tui.commands import COMMANDS
    from trainfast_tui.screens.compare import CompareScreen
    from trainfast_tui.screens.help import HelpScreen
    from trainfast_tui.screens.main import MainScreen
    from trainfast_tui.screens.runs import RunsScreen
    from trainfast_tui.screens.search import SearchScreen
    from trainfast_tui.screens.topo import TopoScreen

    owners = {
        "main": MainScreen,
        "search": SearchScreen,
        "runs": RunsScreen,
        "compare": CompareScreen,
        "topo": TopoScreen,
        "help": HelpScreen,
        "everywhere": TrainfastApp,
    }
    for scope, owner in owners.items():
        keys = [key for command in COMMANDS if command.scope in (scope, "everywhere") for key in command.keys]
        assert len(keys) == len(set(keys)), f"a key means two things: {scope}"
        for command in COMMANDS:
            if command.scope == scope:
                assert hasattr(owner, f"action_{command.id.partition('(')[0]}"), command.id


async def test_the_palette_knows_the_commands_of_the_screen(home: Home) -> None:
    app = StillApp(home)
    async with app.run_test(size=FULL) as pilot:
        await pilot.pause()
        titles = {command.title for command in app.get_system_commands(app.screen)}
        assert {"run (r)", "stop (s)", "preset (p)", "help (?)", "quit (q)"} <= titles
        assert not any(title.startswith("mark") for title in titles)


async def test_the_default_preset_follows_the_machine(home: Home) -> None:
    from recorded import a_gpu

    from trainfast_runner.machine import Machine
    from trainfast_tui.messages import MachineSeen

    gpu = a_gpu(0)
    app = StillApp(home)
    async with app.run_test(size=FULL) as pilot:
        app.post_message(SnapshotTaken(a_snapshot(None)))
        await pilot.pause()
        app.post_message(MachineSeen(Machine(device="cuda", gpus=(gpu,), nvml_gpus=(gpu,), cores=8)))
        await pilot.pause()
        assert app.next_run is not None
        assert app.next_run.spec.preset == "gpt2-medium"
    text, _ = await shown(home, a_snapshot(None), preset="no-such-preset")
    assert "there is no preset 'no-such-preset'" in text


async def test_few_measured_steps_are_said_to_be_few(home: Home) -> None:
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
    assert text.splitlines()[-3].startswith("It printed nothing."), "an empty log takes two lines"


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


async def test_zooming_says_what_the_charts_show(home: Home) -> None:
    snapshot = a_snapshot(a_run(home))
    text, _ = await shown(home, snapshot, "plus")
    assert "The charts show 22 s: there is nothing shorter to show." in text
    text, _ = await shown(home, a_snapshot(None), "minus")
    assert "The charts show 5 min." in text
    text, _ = await shown(home, snapshot, "g")
    assert "first reading: memory" in text


async def test_the_cpu_keeps_its_last_figure_until_the_next(home: Home) -> None:
    import msgspec

    tick = a_tick(20, live=False)
    blank = msgspec.structs.replace(tick, host=msgspec.structs.replace(tick.host, cpu_percent=None))
    app = StillApp(home)
    async with app.run_test(size=FULL) as pilot:
        for one in (tick, blank):
            app.post_message(SnapshotTaken(a_snapshot(None, ticks=(one,))))
            await pilot.pause()
        row = next(line for line in screen_text(app).splitlines() if line.startswith("CPU"))
        assert "–" not in row
        assert " 99 %" in row


async def test_the_next_run_starts_from_the_run_on_the_screen(home: Home) -> None:
    _, app = await shown(home, a_snapshot(a_run(home, knobs={"batch_size": 32, "memory_limit": "2GiB"})))
    assert app.next_run is not None
    assert app.next_run.spec.knobs["batch_size"] == 32
    assert app.next_run.spec.knobs["devices"] is None, "the launcher's own choice is no setting"
    assert not any(app.next_run.is_changed(name) for name in app.next_run.spec.knobs)
    assert GIB == 2**30


async def test_the_smallest_screen_cuts_a_refusal_but_not_its_cure(home: Home) -> None:
    app = StillApp(home)
    async with app.run_test(size=(80, 24)) as pilot:
        app.post_message(SnapshotTaken(a_snapshot(None)))
        await pilot.pause()
        app.post_message(Refused(Problem("because " * 40, key="strategy", advice="strategy=ddp")))
        await pilot.pause()
        text = screen_text(app)
        assert "strategy=ddp" in text
        assert "because …" in text
