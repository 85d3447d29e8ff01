"""The app without its threads: it shows the snapshots a test gives it, and nothing else moves."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from recorded import MIB, START_NS, S, a_run, a_tick, write_lines
from textual.pilot import Pilot

from trainfast_runner.machine.devices import Machine
from trainfast_runner.machine.processes import identify
from trainfast_runner.memory.headroom import AvailableMemory, PredictedFit
from trainfast_runner.memory.prediction import Prediction
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_lines import Event
from trainfast_runner.records.tick import Tick
from trainfast_runner.running.follower import Follower
from trainfast_tui.app import TrainfastApp
from trainfast_tui.control.messages import MachineSeen, NextRunPredicted, SnapshotTaken
from trainfast_tui.control.prediction.prediction_request import PredictionRequest
from trainfast_tui.live.snapshot import Snapshot
from trainfast_tui.next_run.memory_and_speed import NextRunMemory
from trainfast_tui.session import Session

FULL, SMALL = (160, 48), (80, 24)

CPU = Machine(device="cpu", gpus=(), nvml_gpus=(), cores=2)


class StillSession(Session):
    """Sees a machine of two cores; no thread is started."""

    def __init__(self, home: Home, **options: Any) -> None:
        super().__init__(home, **options)
        self.requests: list[PredictionRequest] = []
        self.background.predictor.request = self.requests.append  # type: ignore[method-assign]
        self.background.oom_explainer.explain_if_oom = lambda run, may_trace: None  # type: ignore[method-assign]
        self.background.situations.update = lambda *arguments, is_device_used: None  # type: ignore[method-assign]

    def start(self) -> None:
        self.post(MachineSeen(CPU))


class StillApp(TrainfastApp):
    """The app over a session without threads."""

    session: StillSession

    def __init__(self, home: Home, *, ascii: bool = False, plain_output: bool = False, **options: Any) -> None:
        super().__init__(StillSession(home, **options), ascii=ascii, plain_output=plain_output)

    def begin(self) -> None:
        self.session.start()


@asynccontextmanager
async def running(home: Home, *, size: tuple[int, int], **options: Any) -> AsyncIterator[tuple[StillApp, Pilot[int]]]:
    """Run the app on a screen of this size, in columns and rows."""
    app = StillApp(home, **options)
    async with app.run_test(size=size) as pilot:
        yield app, pilot


def a_snapshot(directory: Path | None, *, second: int = 30, ticks: tuple[Tick, ...] = ()) -> Snapshot:
    """The snapshot that the reader would post `second` seconds after the recorded start."""
    run = None
    if directory is not None:
        follower = Follower(directory)
        follower.poll()
        run = follower.poll()
    return Snapshot(
        taken_ns=START_NS + second * S,
        run=run,
        ticks=ticks or tuple(a_tick(at, live=False) for at in range(max(0, second - 20), second)),
        has_read_home=True,
    )


def own_supervisor() -> Event:
    """The record of a supervisor that is this very process: alive for as long as the test."""
    own = identify(os.getpid())
    assert own is not None
    return Event(t_ns=START_NS, kind="supervisor", pid=own.pid, start_ticks=own.start_ticks)


def a_fit(total_mib: int, available: AvailableMemory | None, **figures: Any) -> PredictedFit:
    """A prediction; `params` to `communication` and `context` are in MiB, other figures are those of the fit."""
    names = ("params", "grads", "optimizer", "activations", "temporary", "communication", "context")
    parts = {f"{name}_bytes": int(figures.pop(name, 0) * MIB) for name in names}
    predicted = Prediction(total_bytes=total_mib * MIB, phase="forward_backward", **parts)
    return PredictedFit(predicted, available, **figures)


FIT = a_fit(
    418,
    AvailableMemory(1 << 30, "memory_limit", from_memory_limit=True),
    params=12,
    grads=12,
    optimizer=24,
    activations=310,
    temporary=60,
    max_batch=21,
)
PREDICTED = NextRunMemory(FIT)


def given(snapshot: Snapshot, *keys: str, memory: NextRunMemory | None = PREDICTED) -> Callable[[Pilot[Any]], Any]:
    """Return a function for `run_before` that gives the app this snapshot and this prediction, then these keys."""

    async def run(pilot: Pilot[Any]) -> None:
        pilot.app.post(SnapshotTaken(snapshot))
        if memory is not None:
            pilot.app.post(NextRunPredicted(memory))
        await pilot.pause()
        for key in keys:
            await pilot.press(key)
            await pilot.pause()

    return run


def screen_text(app: TrainfastApp) -> str:
    """The whole screen as a person reads it."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip) for strip in strips)


async def shown(
    home: Home, snapshot: Snapshot, *keys: str, size: tuple[int, int] = FULL, **options: Any
) -> tuple[str, StillApp]:
    """The screen's text with this snapshot and after these keys."""
    async with running(home, size=size, **options) as (app, pilot):
        app.post(SnapshotTaken(snapshot))
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


async def until(pilot: Pilot[Any], words: str, seconds: float = 60.0) -> str:
    """Wait until `words` stand on the screen, and return the screen's text."""
    await until_true(pilot, lambda: words in screen_text(pilot.app), words, seconds)  # type: ignore[arg-type]
    return screen_text(pilot.app)  # type: ignore[arg-type]


async def until_true(pilot: Pilot[Any], holds: Callable[[], Any], what: str, seconds: float = 60.0) -> None:
    """Let the app go on until `holds` returns true; the screen is painted then. `what` names the condition."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"{what!r} never came:\n{screen_text(pilot.app)}"  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        await pilot.pause()
