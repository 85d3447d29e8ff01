"""The app without its threads: it shows the snapshots a test gives it, and nothing else moves."""

import asyncio
import difflib
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import recorded
from msgspec.structs import replace
from recorded import BEST_ID, MIB, START_NS, S, a_run, a_tick, is_batch, now, own_supervisor, seen, write_lines
from textual._context import active_app
from textual.app import App
from textual.pilot import Pilot

from trainfast_runner.errors import UserError
from trainfast_runner.machine.devices import Machine
from trainfast_runner.machine.processes import ProcessRow
from trainfast_runner.memory.headroom import AvailableMemory, PredictedFit
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_file import Prediction
from trainfast_runner.records.run_lines import Event
from trainfast_runner.records.tick import Tick
from trainfast_runner.running.follower import Follower
from trainfast_runner.search.best_journal import BestRequest
from trainfast_runner.settings.spec import RunSpec
from trainfast_tui.app import TrainfastApp
from trainfast_tui.control.background_work import PredictionRequest
from trainfast_tui.control.messages import MachineSeen, SnapshotTaken
from trainfast_tui.live.snapshot import Snapshot
from trainfast_tui.next_run.sources import NextRunMemory
from trainfast_tui.screens.batch import BatchScreen
from trainfast_tui.screens.best import BestScreen
from trainfast_tui.session import Session
from trainfast_tui.text.memory_words import CATEGORY_WORDS

FULL, MIDDLE, SMALL = (160, 48), (120, 40), (80, 24)
NOW_S, BEST_NOW_S = 18, 40
"""When a batch search and a best fit are looked at, in seconds after their start."""
Lock = Callable[[Path], None]
"""Takes the lock of a run or a search, as its own processes would, until the test ends."""
Conducted = Callable[[list[Any]], Path]
"""Writes the journal of a search that a conductor works on."""
CPU = Machine(device="cpu", gpus=(), nvml_gpus=(), cores=2)
SCREENS = Path(__file__).parent / "screens"


class StillSession(Session):
    """Sees a machine of two cores; no thread is started."""

    def __init__(self, home: Home, machine: Machine = CPU, **options: Any) -> None:
        super().__init__(home, **options)
        self.machine_to_see = machine
        self.requests: list[PredictionRequest] = []
        self.background.predictor.request = self.requests.append  # type: ignore[method-assign]
        self.background.oom_explainer.explain_if_oom = lambda run, may_trace: None  # type: ignore[method-assign]
        self.background.gather_situation = lambda spec, machine: None  # type: ignore[method-assign]
        self.background._keep_standby = lambda *_, **__: None  # type: ignore[method-assign]

    def start(self) -> None:
        self.post(MachineSeen(self.machine_to_see))


class StillApp(TrainfastApp):
    """The app over a session without threads."""

    session: StillSession

    def __init__(self, home: Home, *, ascii: bool = False, plain_output: bool = False, **options: Any) -> None:
        super().__init__(StillSession(home, **options), ascii=ascii, plain_output=plain_output)

    def begin(self) -> None:
        self.session.start()

    @property
    def text(self) -> str:
        """The whole screen as a person reads it."""
        return screen_text(self)

    @property
    def knobs(self) -> dict[str, Any]:
        """The next run's."""
        return self.session.next_run.spec.knobs

    def styles_of(self, text: str) -> list[Any]:
        """The style of each piece of the screen that begins with this text."""
        strips = self.screen._compositor.render_strips()
        return [segment.style for strip in strips for segment in strip if segment.text.startswith(text)]


class StillPilot(Pilot[Any]):
    """The person at the app; what is done returns the screen's text after it."""

    async def post(self, *messages: object) -> str:
        for message in messages:
            self.app.post(message)
        await self.pause()
        return screen_text(self.app)

    async def show(self, snapshot: Snapshot) -> str:
        return await self.post(SnapshotTaken(snapshot))

    async def press(self, *keys: str) -> str:
        await super().press(*keys)
        return screen_text(self.app)

    async def show_search(self, search: Path | None, run: Path | None = None, *, lines: list[Any] | None = None) -> str:
        """Show the reader's next snapshot of this search, whose journal now has these lines."""
        if search is not None and lines is not None:
            write_lines(search / "journal.jsonl", lines)
        if search is not None and is_batch(search):
            return await self.show(replace(a_snapshot(run, second=NOW_S), batch_search=seen(search)))
        return await self.show(replace(a_snapshot(run, second=BEST_NOW_S), best_search=search and seen(search)))

    async def opened(self, search: Path | None) -> str:
        """Open the screen of this search, a batch search's with its knobs as the next run's; of a best fit for None."""
        await self.show_search(search)
        if search is None or not is_batch(search):
            text = await self.press("B")
            assert isinstance(self.app.screen, BestScreen)
            return text
        session = self.app.session
        limit = seen(search).question.knobs["memory_limit"]
        session.set_next_run(session.next_run.with_value("memory_limit", limit))
        text = await self.press("b")
        assert isinstance(self.app.screen, BatchScreen)
        return text

    async def monitor(self, snapshot: Snapshot) -> str:
        """Open the monitor of this machine."""
        await self.show(snapshot)
        await self.press("m")
        await self.show(snapshot)
        await self.pause()
        return screen_text(self.app)

    async def until(self, words: str) -> str:
        """Wait until `words` stand on the screen."""
        await self.until_true(lambda: words in screen_text(self.app), words)
        return screen_text(self.app)

    async def until_true(self, holds: Callable[[], Any], what: str) -> None:
        """Let the app go on until `holds` returns true; the screen is painted then. `what` names the condition."""
        deadline = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < deadline, f"{what!r} never came:\n{screen_text(self.app)}"
            await asyncio.sleep(0.01)
            await self.pause()


@dataclass
class AskedSearch:
    """A search that was asked for; `best` is the question of a best fit."""

    spec: RunSpec
    fresh: bool
    best: BestRequest | None


class Starts:
    """Stands in for the start of a conductor: remembers what was asked, and gives the search a test has prepared."""

    def __init__(self) -> None:
        self.asked: list[AskedSearch] = []
        self.directory: Path | None = None
        self.refusal: UserError | None = None
        self.go = threading.Event()
        self.go.set()

    def start(
        self, spec: RunSpec, home: Home, python: str | None, *, fresh: bool = False, best: BestRequest | None = None
    ) -> Path:
        self.asked.append(AskedSearch(spec, fresh, best))
        assert self.go.wait(60)
        if self.refusal is not None:
            raise self.refusal
        return self.directory or home.search_directory(BEST_ID)


def screen_text(app: TrainfastApp) -> str:
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip) for strip in strips)


@asynccontextmanager
async def running(
    home: Home, snapshot: Snapshot | None = None, *, size: tuple[int, int] = FULL, **options: Any
) -> AsyncIterator[tuple[StillApp, StillPilot]]:
    """Run the app on a screen of this size, in columns and rows, and show it this snapshot."""
    app = StillApp(home, **options)
    async with app.run_test(size=size):
        pilot = StillPilot(app)
        if snapshot is not None:
            await pilot.show(snapshot)
        yield app, pilot


async def shown(
    home: Home, snapshot: Snapshot, *keys: str, size: tuple[int, int] = FULL, **options: Any
) -> tuple[str, StillApp]:
    """The screen's text with this snapshot and after these keys."""
    async with running(home, snapshot, size=size, **options) as (app, pilot):
        return await pilot.press(*keys), app


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


def the_machine(gpus: int = 8, *, rows: tuple[ProcessRow, ...] | None = None) -> Snapshot:
    """A machine of several GPUs, without a driver."""
    ticks = tuple(recorded.a_full_tick(second, gpus) if gpus else a_tick(second, live=False) for second in range(80))
    processes = recorded.some_rows(gpus) if rows is None else rows
    return replace(a_snapshot(None, second=80, ticks=ticks), processes=processes)


def a_fit(total_mib: int, available: AvailableMemory | None, **figures: Any) -> PredictedFit:
    """A prediction; its categories and `context` are in MiB, other figures are those of the fit."""
    parts = {f"{name}_bytes": int(figures.pop(name, 0) * MIB) for name in (*CATEGORY_WORDS, "context")}
    predicted = Prediction(total_bytes=total_mib * MIB, phase="forward_backward", **parts)
    return PredictedFit(predicted, available, **figures)


LIMIT = AvailableMemory(1 << 30, "memory_limit", from_memory_limit=True)
FIT = a_fit(418, LIMIT, params=12, grads=12, optimizer=24, activations=310, temporary=60, max_batch=21)
PREDICTED = NextRunMemory(FIT)


def a_live_run(home: Home, hold: Callable[[Path], None], *events: Event, **options: Any) -> Path:
    """A run with a supervisor, in the middle of its steps."""
    directory = a_run(home, with_result=False, **options)
    hold(directory)
    write_lines(directory / "events.jsonl", [own_supervisor(), now(), *events])
    return directory


def a_live_ramp(home: Home, hold: Callable[[Path], None], until: int) -> Path:
    """The live run of `a_thermal_ramp` in this second."""
    directory = recorded.a_thermal_ramp(home, with_result=False)
    hold(directory)
    write_lines(directory / "telemetry.jsonl", [recorded.a_ramp_tick(second) for second in range(until)])
    write_lines(directory / "events.jsonl", [own_supervisor(), now()])
    return directory


def has(text: str, *words: str) -> None:
    """All of these words stand in the text."""
    missing = [word for word in words if word not in text]
    assert not missing, f"not on the screen: {missing}\n{text}"


def lacks(text: str, *words: str) -> None:
    """None of these words stands in the text."""
    found = [word for word in words if word in text]
    assert not found, f"on the screen: {found}\n{text}"


def assert_screen(app: TrainfastApp, name: str) -> None:
    """The screen reads as in `screens/NAME.txt`; with TRAINFAST_UPDATE_SCREENS=1 the file is written instead."""
    path = SCREENS / f"{name}.txt"
    shown = "".join(f"{line.rstrip()}\n" for line in screen_text(app).splitlines())
    if os.environ.get("TRAINFAST_UPDATE_SCREENS"):
        SCREENS.mkdir(exist_ok=True)
        path.write_text(shown, encoding="utf-8")
    expected = path.read_text(encoding="utf-8")
    difference = difflib.unified_diff(expected.splitlines(), shown.splitlines(), path.name, "the screen", lineterm="")
    assert shown == expected, "\n".join([*difference, "if it is wanted: TRAINFAST_UPDATE_SCREENS=1 takes it over"])


ROUNDS = 500
"""A screen that wants to be painted for ever is a defect, and is looked at as it is."""


async def settled(min_sleep: float = 0.0, max_sleep: float = 0.0) -> None:
    """Wait until every message has been handled and the screen is painted, whatever else the machine does meanwhile.

    Takes the place of `textual._wait.wait_for_idle`, which takes a process that got no processor for an idle one. A
    test waits by itself for other threads and for timers.
    """
    for _ in range(ROUNDS):
        await _nothing_ready()
        if not _paint(active_app.get(None)):
            return


async def _nothing_ready() -> None:
    """Wait until all tasks wait: for a message, a thread or a time."""
    ready = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]
    idle_rounds = 0
    while idle_rounds < 2:
        await asyncio.sleep(0)
        idle_rounds = 0 if ready else idle_rounds + 1


def _paint(app: App[object] | None) -> bool:
    """Resize and paint what the app's timers would; False if there was nothing to do."""
    if app is not None and app._resize_event is not None:
        app._check_resize()
        return True
    screen = app.screen_stack[-1] if app is not None and app._running and app.screen_stack else None
    if app is None or screen is None or not screen.is_running or app._batch_count:
        return False
    wanted = screen._layout_required or screen._scroll_required or screen._repaint_required
    if not (wanted or screen._recompose_required or screen._dirty_widgets or screen._callbacks):
        return False
    screen._on_timer_update()
    return True
