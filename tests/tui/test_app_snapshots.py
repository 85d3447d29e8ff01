"""How the screens look, from recorded runs. A wanted change is taken over with `pytest --snapshot-update`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from recorded import START_NS, S, a_run, a_thermal_ramp, an_oom_run, write_lines
from still import StillApp, a_snapshot, given, own_supervisor

from trainfast_runner.records.home import Home
from trainfast_runner.records.run_lines import Event

SnapCompare = Callable[..., bool]


def assert_looks(snap_compare: SnapCompare, app: StillApp, **options: Any) -> None:
    """The picture is the recorded one, and not that of an app that broke."""
    same = snap_compare(app, **options)
    assert app.return_code == 0
    assert same


@pytest.fixture
def live(home: Home, hold: Callable[[Path], None]) -> Callable[..., Path]:
    """Makes a run that is in the middle of its steps."""

    def make(**options: Any) -> Path:
        directory = a_run(home, with_result=False, **options)
        hold(directory)
        state = Event(t_ns=START_NS + S, kind="state", state="running")
        write_lines(directory / "events.jsonl", [own_supervisor(), state])
        return directory

    return make


def test_a_live_run(home: Home, live: Callable[..., Path], snap_compare: SnapCompare) -> None:
    before = given(a_snapshot(live(), second=23))
    assert_looks(snap_compare, StillApp(home), terminal_size=(160, 48), run_before=before)


def test_a_live_run_on_the_smallest_screen(home: Home, live: Callable[..., Path], snap_compare: SnapCompare) -> None:
    before = given(a_snapshot(live(), second=23))
    assert_looks(snap_compare, StillApp(home), terminal_size=(80, 24), run_before=before)


def test_eight_gpus(home: Home, live: Callable[..., Path], snap_compare: SnapCompare) -> None:
    before = given(a_snapshot(live(gpus=8), second=23))
    assert_looks(snap_compare, StillApp(home), terminal_size=(160, 48), run_before=before)


def test_the_thermal_ramp_is_shaded_on_every_chart(home: Home, snap_compare: SnapCompare) -> None:
    before = given(a_snapshot(a_thermal_ramp(home), second=38), "e")
    assert_looks(snap_compare, StillApp(home), terminal_size=(140, 48), run_before=before)


def test_the_first_start(home: Home, snap_compare: SnapCompare) -> None:
    assert_looks(snap_compare, StillApp(home), terminal_size=(100, 30), run_before=given(a_snapshot(None)))


def test_out_of_memory(home: Home, snap_compare: SnapCompare) -> None:
    before = given(a_snapshot(an_oom_run(home)))
    assert_looks(snap_compare, StillApp(home), terminal_size=(120, 36), run_before=before)


def test_turned_knobs_and_the_log_in_a_light_theme(home: Home, snap_compare: SnapCompare) -> None:
    log = "".join(f"step {number} done\n" for number in range(30))
    before = given(a_snapshot(a_run(home, log=log)), "right", "down", "right", "l", "f2", "f2", "f2")
    assert_looks(snap_compare, StillApp(home), terminal_size=(120, 40), run_before=before)


def test_ascii(home: Home, live: Callable[..., Path], snap_compare: SnapCompare) -> None:
    before = given(a_snapshot(live(), second=23))
    assert_looks(snap_compare, StillApp(home, ascii=True), terminal_size=(100, 30), run_before=before)


def test_a_comparison(home: Home, snap_compare: SnapCompare) -> None:
    from trainfast_runner.records.run_directory import read_result
    from trainfast_tui.control.messages import RunsCompared

    results = [
        read_result(a_run(home, "20261121-054455-tiny-llama-7f3a")),
        read_result(a_run(home, "20261121-055012-tiny-llama-91bc", knobs={"batch_size": 16}, step_ms=700.0)),
    ]
    assert results[0] is not None
    assert results[1] is not None
    compared = RunsCompared(results[0], results[1])

    async def before(pilot: Any) -> None:
        pilot.app.post(compared)
        await pilot.pause()

    assert_looks(snap_compare, StillApp(home), terminal_size=(120, 32), run_before=before)


def test_the_list_of_runs(home: Home, snap_compare: SnapCompare) -> None:
    from trainfast_runner.running.history import iter_rows
    from trainfast_tui.screens.runs import RunsListed, RunsScreen

    a_run(home, "20261121-054455-tiny-llama-7f3a")
    a_run(home, "20261121-055012-bert-large-91bc", preset="bert-large", synthetic=True, knobs={"precision": "bf16"})
    an_oom_run(home)
    rows = list(iter_rows(home))

    class Listed(RunsScreen):
        def action_reload(self) -> None:
            self.post(RunsListed(rows, 0))

    async def before(pilot: Any) -> None:
        await pilot.app.push_screen(Listed(pilot.app.session))
        await pilot.pause()
        await pilot.press("space", "down")

    assert_looks(snap_compare, StillApp(home), terminal_size=(120, 20), run_before=before)


@pytest.mark.parametrize("size", [(120, 40), (80, 24)])
def test_a_search_for_the_largest_batch(home: Home, size: tuple[int, int], snap_compare: SnapCompare) -> None:

    from searched import a_search, answered, seen

    from trainfast_tui.control.messages import SnapshotTaken

    found = seen(a_search(home, answered()))

    async def before(pilot: Any) -> None:
        pilot.app.post(SnapshotTaken(replace(a_snapshot(None), batch_search=found)))
        await pilot.pause()
        pilot.app.session.set_next_run(pilot.app.session.next_run.with_value("memory_limit", "1GiB"))
        await pilot.press("b")

    assert_looks(snap_compare, StillApp(home), terminal_size=size, run_before=before)


@pytest.mark.parametrize("size", [(160, 48), (80, 24)])
@pytest.mark.parametrize("state", ["live", "answered"])
def test_a_search_for_the_best_fit(
    home: Home, conduct: Callable[[Path], None], size: tuple[int, int], state: str, snap_compare: SnapCompare
) -> None:
    from best_searched import a_best_search, best_answered, best_going_on, best_opened

    search = a_best_search(home, best_going_on() if state == "live" else best_answered())
    conduct(search)

    async def before(pilot: Any) -> None:
        await best_opened(pilot, search)

    assert_looks(snap_compare, StillApp(home), terminal_size=size, run_before=before)
