"""Searches for the largest batch written by hand, every figure fixed, as a conductor would leave them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from recorded import GIB, MIB, START_NS, WALL_NS, S, write_lines
from still import StillApp, a_snapshot, screen_text
from textual.pilot import Pilot

from trainfast_runner.errors import UserError
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_file import ClockAnchor
from trainfast_runner.search.batch.batch_follower import BatchFollower, BatchSnapshot
from trainfast_runner.search.best.planning.request import BestRequest
from trainfast_runner.search.journal.batch import (
    BatchAnswer,
    BatchEnded,
    BatchLaunched,
    BatchQuestion,
    BatchStep,
    Change,
    ConfirmationRun,
    Predicted,
    Probe,
    RankPeaks,
)
from trainfast_runner.search.journal.fitted_memory import MemoryFit, PhaseFit
from trainfast_runner.search.journal.lines import Conducted
from trainfast_runner.settings.spec import RunSpec, resolve
from trainfast_tui.control.messages import SnapshotTaken
from trainfast_tui.screens.batch import BatchScreen

FULL, SMALL = (120, 40), (80, 24)
NOW_S = 18
SEARCH_ID = "20261121-070000-tiny-llama-5ea2"
RUN_ID = "20261121-070002-tiny-llama-b001"
CONFIRMATION_ID = "20261121-070044-tiny-llama-b002"


def a_fit(rank: int = 0, limit: int = GIB) -> MemoryFit:
    """118 MiB and 21.5 MiB a sample before the step, 190 MiB in it."""
    return MemoryFit(
        rank=rank,
        lines=[
            PhaseFit(phase="forward_backward", fixed_bytes=118 * MIB, bytes_per_sample=21.5 * MIB),
            PhaseFit(phase="optimizer", fixed_bytes=190 * MIB, bytes_per_sample=0.0),
        ],
        limit_bytes=limit,
        error_bytes=8 * MIB,
    )


def a_probe(batch: int, *, outcome: str = "fits", at: int = 0, **changes: Any) -> Probe:
    """A probe on the line of `a_fit`."""
    peak = int((118 + 21.5 * batch) * MIB)
    fields: dict[str, Any] = {
        "t_ns": START_NS + at * S,
        "batch_size": batch,
        "outcome": outcome,
        "run_id": RUN_ID,
        "seconds": 2.5 + batch / 8,
        "rank": 0,
        "phase": "forward_backward",
        "phase_peaks": {"forward_backward": peak, "optimizer": 190 * MIB},
        "peak_allocated_bytes": peak,
        "peak_reserved_bytes": peak,
        "samples_per_s": 17.0 - batch / 20,
        "step_ms": batch / (17.0 - batch / 20) * 1e3,
        "ranks": [RankPeaks(rank=0, phase_peaks={"forward_backward": peak}, limit_peak_bytes=peak + 2 * MIB)],
    }
    if outcome == "oom":
        fields |= {"phase": "backward", "samples_per_s": None, "step_ms": None, "phase_peaks": {}, "ranks": []}
    return Probe(**{**fields, **changes})


def asked(**changes: Any) -> BatchQuestion:
    """tiny-llama under 1 GiB."""
    spec = resolve("tiny-llama", ["memory_limit=1GiB"])
    # The plan writes down how many devices it takes.
    knobs = {**spec.knobs, "devices": 1}
    fields: dict[str, Any] = {
        "t_ns": START_NS,
        "search_id": SEARCH_ID,
        "key": "k",
        "preset": "tiny-llama",
        "model": spec.model,
        "data": spec.data,
        "knobs": knobs,
        "limits_bytes": [GIB],
        "limit_words": "memory_limit",
        "clock": ClockAnchor(monotonic_ns=START_NS, wall_ns=WALL_NS),
    }
    return BatchQuestion(**{**fields, **changes})


CONDUCTED = Conducted(t_ns=START_NS, pid=1, start_ticks=1, boot_id="")
PREDICTED = Predicted(t_ns=START_NS + S, fixed_bytes=115 * MIB, bytes_per_sample=22 * MIB, max_batch=41, basis="traced")
LAUNCHED = BatchLaunched(t_ns=START_NS + 2 * S, run_id=RUN_ID, role="probe")
ANSWER = BatchAnswer(
    max_batch=42,
    aligned_batch=40,
    recommended_batch=40,
    recommended_why="leaves 46.0 MiB: 3 % for fragmentation, and what an evaluation keeps beside the training",
    fastest_batch=8,
    fastest_samples_per_s=16.6,
    limit_bytes=GIB,
    headroom_bytes=3 * MIB,
    fixed_bytes=118 * MIB,
    bytes_per_sample=int(21.5 * MIB),
    phase="forward_backward",
    confirmation_run_id=CONFIRMATION_ID,
    certainty="44 ran out of memory in backward, and the fit says that 43 needs 18.5 MiB more than the limit",
)


def going_on() -> list[Any]:
    """Two probes made, the third under way."""
    return [
        asked(),
        CONDUCTED,
        PREDICTED,
        LAUNCHED,
        BatchStep(
            t_ns=START_NS + 2 * S, action="probe", batch_size=8, why="the prediction's 41 is far: a point for the fit"
        ),
        a_probe(8, at=6),
        BatchStep(
            t_ns=START_NS + 6 * S,
            action="probe",
            batch_size=32,
            why="a second point",
            memory_fits=[a_fit()],
            tightest_rank=0,
        ),
        a_probe(32, at=13),
        BatchStep(
            t_ns=START_NS + 13 * S,
            action="probe",
            batch_size=42,
            why="the fit of 2 probes reaches the limit at 42.1",
            needs_bytes=int((118 + 21.5 * 42) * MIB),
            memory_fits=[a_fit()],
            tightest_rank=0,
        ),
    ]


def answered(**changes: Any) -> list[Any]:
    """An answered search: four probes, of which one ran out of memory, and the confirmation run."""
    last = BatchStep(
        t_ns=START_NS + 40 * S, action="end", why="42 is confirmed", memory_fits=[a_fit()], tightest_rank=0
    )
    return [
        *going_on(),
        a_probe(42, at=20),
        a_probe(44, outcome="oom", at=30),
        ConfirmationRun(
            t_ns=START_NS + 40 * S,
            batch_size=42,
            run_id=CONFIRMATION_ID,
            state="finished",
            peak_allocated_bytes=1021 * MIB,
            samples_per_s=14.8,
            seconds=12.0,
        ),
        last,
        BatchEnded(t_ns=START_NS + 40 * S, state="answered", answer=ANSWER, seconds=41.0, **changes),
    ]


def nothing_fits() -> list[Any]:
    """Batch 1 is too large, and two changes would help."""
    changes = [
        Change(settings={"optimizer": "adafactor"}, saves="frees 120 MiB", costs="slower to converge"),
        Change(settings={"checkpointing": "full", "precision": "bf16"}, saves="frees 150 MiB", costs="20-30 % slower"),
    ]
    return [
        asked(knobs={**asked().knobs, "memory_limit": "64MiB"}, limits_bytes=[64 * MIB]),
        CONDUCTED,
        a_probe(1, outcome="oom", at=5),
        BatchEnded(t_ns=START_NS + 6 * S, state="nothing_fits", missing_bytes=75 * MIB, changes=changes, seconds=6.0),
    ]


def a_search(home: Home, lines: list[Any], search_id: str = SEARCH_ID) -> Path:
    """Write a search's journal and return its directory; a process that holds `search.lock` there conducts it."""
    directory = home.path / "searches" / search_id
    directory.mkdir(parents=True)
    write_lines(directory / "journal.jsonl", lines)
    (directory / "search.lock").touch(mode=0o600)
    return directory


def seen(directory: Path) -> BatchSnapshot:
    """The search as the reader sees it."""
    return BatchFollower(directory).poll()


async def show(pilot: Pilot[Any], search: Path | None, run: Path | None = None) -> None:
    """Post the reader's next snapshot, with this search and this run."""
    snapshot = a_snapshot(run, second=NOW_S)
    found = None if search is None else seen(search)
    pilot.app.post(SnapshotTaken(replace(snapshot, batch_search=found)))
    await pilot.pause()


async def opened(pilot: Pilot[Any], search: Path) -> str:
    """Open the screen of this search, with the knobs that it is about, and return the screen's text."""
    app = pilot.app
    assert isinstance(app, StillApp)
    await show(pilot, search)
    journal = seen(search)
    assert app.session.next_run is not None
    assert journal.question is not None
    app.session.set_next_run(app.session.next_run.with_value("memory_limit", journal.question.knobs["memory_limit"]))
    await pilot.press("b")
    await pilot.pause()
    assert isinstance(app.screen, BatchScreen)
    return screen_text(app)


class Starts:
    """Stands in for the start of a conductor: remembers what was asked, and gives the search a test has prepared."""

    def __init__(self) -> None:
        self.asked: list[tuple[dict[str, Any], bool]] = []
        self.directory: Path | None = None
        self.refusal: UserError | None = None
        self.go = threading.Event()
        self.go.set()

    def start(
        self,
        spec: RunSpec,
        home: Home,
        python: str | None = None,
        *,
        fresh: bool = False,
        best: BestRequest | None = None,
    ) -> Path:
        assert best is None, "a batch search has no options of a best-fit one"
        self.asked.append((dict(spec.knobs), fresh))
        assert self.go.wait(60)
        if self.refusal is not None:
            raise self.refusal
        assert self.directory is not None
        return self.directory
