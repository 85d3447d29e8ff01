"""A driver or a binding that does not work: its sentence with the cure is on the screen, and all else goes on."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from recorded import a_run, a_tick
from still import a_snapshot, running, screen_text

from trainfast_runner.machine.telemetry.binding import library_failure
from trainfast_runner.records.home import Home
from trainfast_tui.control.messages import SnapshotTaken


async def seen(home: Home, run: Path, missing: dict[str, str], *keys: str, gpus: int = 0) -> str:
    tick = msgspec.structs.replace(a_tick(20, gpus=gpus, live=False), missing=missing)
    async with running(home, size=(160, 48)) as (app, pilot):
        snapshot = a_snapshot(run, ticks=(tick,))
        app.post(SnapshotTaken(snapshot))
        await pilot.pause()
        for key in keys:
            await pilot.press(key)
            app.post(SnapshotTaken(snapshot))
            await pilot.pause()
        return " ".join(screen_text(app).split())


@pytest.mark.parametrize(("code", "cure"), [(18, "reboot, or reload the nvidia kernel modules"), (4, "/dev/nvidia*")])
async def test_the_cure_is_on_both_screens(home: Home, code: int, cure: str) -> None:
    run, missing = a_run(home), {"nvml": library_failure(code, "its name").sentence}
    main = await seen(home, run, missing)
    assert "no GPU: " in main
    assert missing["nvml"][:60] in main
    assert cure in await seen(home, run, missing, "m")


async def test_no_driver_at_all_is_no_trouble(home: Home) -> None:
    main = await seen(home, a_run(home), {"nvml": library_failure(12, "its name").sentence})
    assert "no GPU" in main
    assert "libnvidia-ml" not in main
