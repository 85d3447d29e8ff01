"""`searches/SEARCH_ID/journal.jsonl`: all that a search was asked, did and found, one line at a time.

The journal is what a search continues from, and what a screen shows of it. Sizes are bytes, times CLOCK_MONOTONIC
nanoseconds, as in a run's records.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from trainfast_runner.records.json_lines import Appender, read_all
from trainfast_runner.records.run_file import SCHEMA, ClockAnchor, RecordedSpec
from trainfast_runner.records.search_directories import JOURNAL_FILE
from trainfast_runner.search.fit import Fit

PAUSE_FILE = "paused"
"""While this file is there the conductor takes no further step."""
OUTCOMES = ("fits", "oom", "void")
END_STATES = ("answered", "nothing_fits", "failed", "cancelled")
CANCELLED = "the same command continues it"
"""The reason of an end that somebody asked for; any other reason of `cancelled` is what broke the search off."""


class Line(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """What every line has."""

    t_ns: int = msgspec.field(default_factory=time.monotonic_ns)


class Asked(RecordedSpec, frozen=True, kw_only=True, tag_field="kind", tag="asked"):
    """The first line. `key` tells searches apart: the same command has the same. `limit_words` say whose limit it is.

    `limits_bytes` is one figure a rank; empty on a GPU without `memory_limit`, where each rank says what it may use.
    """

    t_ns: int = msgspec.field(default_factory=time.monotonic_ns)
    schema: int = SCHEMA
    search_id: str
    key: str
    device: str = "cpu"
    world_size: int = 1
    limits_bytes: list[int] = []
    limit_words: str = ""
    clock: ClockAnchor


class Conducted(Line, frozen=True, kw_only=True, tag="conducted"):
    """A process takes the search up, from its start or from where another left it."""

    pid: int
    start_ticks: int
    boot_id: str
    no_oom: bool = False
    proof_steps: int = 10


class Predicted(Line, frozen=True, kw_only=True, tag="predicted"):
    """What the memory model says of the fullest rank: `fixed_bytes + batch_size * bytes_per_sample`.

    `linear_from` is the batch size from which that line holds: below it the peak is at another point of the step, where
    less or nothing grows with the batch. None of all, with the reason, where there is no prediction: the search then
    starts from a batch of 1.
    """

    fixed_bytes: int | None = None
    bytes_per_sample: int | None = None
    max_batch: int | None = None
    linear_from: int = 1
    basis: str = ""
    reason: str = ""


class Next(Line, frozen=True, kw_only=True, tag="next"):
    """What is done next and why. `action` is probe, prove or end; `fits` what is known so far, one of each rank."""

    action: str
    batch_size: int | None = None
    why: str
    needs_bytes: int | None = None
    """What the fit says this batch needs on the tightest rank."""
    fits: list[Fit] = []
    tightest_rank: int | None = None


class Launched(Line, frozen=True, kw_only=True, tag="launched"):
    """A run that belongs to the search was started. `role` is probe or proof."""

    run_id: str
    role: str


class CoolingDown(Line, frozen=True, kw_only=True, tag="cooling"):
    """The next process waits: the hottest watched GPU, `device` by NVML index, is not below `below_c` yet."""

    device: int
    temperature_c: float
    below_c: float
    waited_s: float
    stuck_s: float = 0.0


class RankPeaks(msgspec.Struct, frozen=True, kw_only=True):
    """One rank in one probe: its peaks by phase, and what it may use at most.

    `limit_peak_bytes` is the peak as the limit counts it (on a CPU reserved address space, which is a little more
    than what is resident); None where this probe was not the highest so far, or on a GPU.
    """

    rank: int
    phase_peaks: dict[str, int] = {}
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    limit_peak_bytes: int | None = None
    room_bytes: int | None = None
    alloc_retries: int | None = None
    step_ms: float | None = None


class Probe(Line, frozen=True, kw_only=True, tag="probe"):
    """A batch size that was tried. `outcome` is fits, oom, or void (something else took memory meanwhile: repeated).

    Peaks are those of the rank that came closest to its limit, `rank`; where memory ran out, `rank` is where, `phase`
    in which phase, and the peaks are what had been reached by then. `samples_per_s` is summed over ranks.
    """

    batch_size: int
    outcome: str
    run_id: str
    seconds: float
    reason: str = ""
    rank: int | None = None
    phase: str | None = None
    phase_peaks: dict[str, int] = {}
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    alloc_retries: int | None = None
    samples_per_s: float | None = None
    step_ms: float | None = None
    ranks: list[RankPeaks] = []


class Proof(Line, frozen=True, kw_only=True, tag="proof"):
    """A normal run of a fresh process at a batch size. `state` is that run's end state.

    `ranks` has the peaks of each rank over all of its steps, warm-up included; none of a rank that ended no step.
    `refutes` are the sizes that had fitted in a probe and do not count any more, because memory ran out in this run.
    """

    batch_size: int
    run_id: str
    state: str
    reason: str = ""
    peak_allocated_bytes: int | None = None
    ranks: list[RankPeaks] = []
    samples_per_s: float | None = None
    seconds: float
    refutes: list[int] = []


class Paused(Line, frozen=True, kw_only=True, tag="paused"):
    """Asked to wait: nothing of the search runs or holds memory until it is resumed."""


class Resumed(Line, frozen=True, kw_only=True, tag="resumed"):
    """Going on after a pause."""


class Margin(msgspec.Struct, frozen=True, kw_only=True):
    """A part of what the recommended batch leaves free, and why."""

    margin_bytes: int
    why: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What was found. `headroom_bytes` is what `max_batch` leaves of the tightest rank's limit, measured, and
    `samples_per_s` what its proof ran at, summed over ranks.

    `aligned_batch` is the largest multiple of 8 (of 64 from 512 on) within `max_batch`, None below 8.
    `fixed_bytes`, `bytes_per_sample` and `phase` are the line that limits the batch on the tightest rank.
    """

    max_batch: int
    samples_per_s: float | None = None
    aligned_batch: int | None = None
    recommended_batch: int
    recommended_why: str = ""
    margins: list[Margin] = []
    fastest_batch: int | None = None
    fastest_samples_per_s: float | None = None
    limit_bytes: int | None = None
    headroom_bytes: int | None = None
    fixed_bytes: int | None = None
    bytes_per_sample: int | None = None
    phase: str | None = None
    tightest_rank: int = 0
    proof_run_id: str | None = None
    certainty: str = ""
    """What says that a larger batch does not fit: the size that ran out of memory, or the fit; and what was not tried.
    """
    too_large: int | None = None
    """The smallest larger size that ran out of memory; None where none did."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change of knobs that would make a batch of 1 fit. `predicted_bytes` is what it then needs.

    Where none is enough these are the closest, with `missing_bytes`: what each is still too much by.
    """

    settings: dict[str, str]
    words: str
    costs: str = ""
    predicted_bytes: int | None = None
    missing_bytes: int | None = None


class Ended(Line, frozen=True, kw_only=True, tag="ended"):
    """How it ended: answered, nothing_fits (with what is missing), failed, or cancelled: the same command continues."""

    state: str
    reason: str = ""
    answer: Answer | None = None
    missing_bytes: int | None = None
    changes: list[Change] = []
    seconds: float = 0.0
    """Of the conductors that worked on it, together, pauses left out."""


AnyLine = Asked | Conducted | Predicted | Next | Launched | CoolingDown | Probe | Proof | Paused | Resumed | Ended


def refuted_by(probe: Probe, proofs: Iterable[Proof]) -> Proof | None:
    """The proof that ran out of memory at this size or a smaller one, although the size had fitted in this probe."""
    return next((proof for proof in proofs if probe.outcome == "fits" and probe.batch_size in proof.refutes), None)


class Journal:
    """The journal of one search, open for appending by the one who holds its lock."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        _end_cut_line(directory / JOURNAL_FILE)
        self._file = Appender(directory / JOURNAL_FILE)

    def write(self, line: AnyLine) -> None:
        """Append one line; it is on disk before anything follows from it."""
        self._file.write(line)

    def close(self) -> None:
        """No more lines."""
        self._file.close()


def _end_cut_line(path: Path) -> None:
    """A line that a killed conductor left half-written does not swallow the next one."""
    with suppress(FileNotFoundError), path.open("rb+") as file:
        if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            file.write(b"\n")


def read_journal(directory: Path) -> list[AnyLine]:
    """Every readable line, oldest first; a half-written last one is left out."""
    lines: list[AnyLine]
    lines, _ = read_all(directory / JOURNAL_FILE, AnyLine)  # type: ignore[arg-type]
    return lines
