"""`r` on what does not fit this machine's memory asks once; what a limit or a GPU would refuse is not asked about."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from recorded import GIB
from still import CPU, FIT, FULL, StillApp, a_fit, a_snapshot, screen_text

from trainfast_runner.machine.devices import Machine
from trainfast_runner.memory.headroom import AvailableMemory, PredictedFit
from trainfast_runner.records.home import Home
from trainfast_runner.settings.spec import RunSpec
from trainfast_tui.control.messages import NextRunPredicted, SnapshotTaken
from trainfast_tui.next_run.memory_and_speed import NextRunMemory
from trainfast_tui.text.memory_words import swap_notice

FREE = AvailableMemory(20 * GIB, "free")
TOO_MUCH = a_fit(48 * 1024, FREE)


async def test_r_asks_before_a_run_that_would_make_the_machine_swap(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = StillApp(home)
    started: list[RunSpec] = []
    monkeypatch.setattr(app.session.run_control, "start", lambda spec, after: started.append(spec))
    async with app.run_test(size=FULL) as pilot:
        app.post(SnapshotTaken(a_snapshot(None)))
        await pilot.pause()
        too_much = NextRunMemory(TOO_MUCH, spec=app.session.requests[-1].spec)
        app.post(NextRunPredicted(too_much))
        await pilot.pause()
        await pilot.press("r")
        await pilot.pause()
        text = " ".join(screen_text(app).split())
        assert "Predicted to need 48.0 GiB of 20.0 GiB (free): 28.0 GiB too much" in text
        await pilot.press("n")
        assert not started
        await pilot.press("r", "y")
        assert [spec.name for spec in started] == ["tiny-llama"]
        app.post(NextRunPredicted(msgspec.structs.replace(too_much, fit=FIT)))
        await pilot.pause()
        await pilot.press("r")
        assert len(started) == 2, "what fits is not asked about"


async def test_the_prediction_of_earlier_settings_asks_nothing(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    app = StillApp(home)
    started: list[RunSpec] = []
    monkeypatch.setattr(app.session.run_control, "start", lambda spec, after: started.append(spec))
    async with app.run_test(size=FULL) as pilot:
        app.post(SnapshotTaken(a_snapshot(None)))
        await pilot.pause()
        app.post(NextRunPredicted(NextRunMemory(TOO_MUCH, spec=app.session.requests[-1].spec)))
        await pilot.pause()
        assert app.session.set_knobs([("seq_len", "16")])
        await pilot.pause()
        await pilot.press("r")
        await pilot.pause()
        assert [spec.knobs["seq_len"] for spec in started] == [16]


@pytest.mark.parametrize(
    ("fit", "machine"),
    [
        (replace(TOO_MUCH, available=AvailableMemory(20 * GIB, "memory_limit", from_memory_limit=True)), CPU),
        (TOO_MUCH, Machine(device="cuda", gpus=(), nvml_gpus=(), cores=2)),
        (a_fit(19 * 1024, FREE), CPU),
        (replace(TOO_MUCH, available=None), CPU),
        (None, CPU),
    ],
)
def test_where_nothing_but_the_run_would_end_there_is_no_question(fit: PredictedFit | None, machine: Machine) -> None:
    assert swap_notice(fit, machine) == ""
    assert swap_notice(TOO_MUCH, CPU)
    assert "less than memory_limit" in swap_notice(
        replace(TOO_MUCH, available=AvailableMemory(GIB, "free, less than memory_limit")), CPU
    )
