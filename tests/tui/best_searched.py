"""Best-fit searches written by hand, every figure fixed, as a conductor would leave them."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from recorded import GIB, MIB, START_NS, WALL_NS, S, write_lines
from still import StillApp, a_snapshot, screen_text
from textual.pilot import Pilot

from trainfast_runner.records.home import Home
from trainfast_runner.records.run_file import ClockAnchor
from trainfast_runner.search.best.best_follower import BestFollower, BestSnapshot
from trainfast_runner.search.journal.best import (
    BestAnswer,
    BestEnded,
    BestLaunched,
    BestQuestion,
    BestStep,
    Candidate,
    CandidateVerdict,
    ColdRun,
    Effect,
    Interval,
    ProcessReady,
    Space,
    Trial,
)
from trainfast_runner.search.journal.lines import Conducted
from trainfast_runner.settings.spec import resolve
from trainfast_runner.worker.shared.search_roles import TRIAL
from trainfast_tui.control.messages import SnapshotTaken
from trainfast_tui.screens.best import BestScreen

BEST_ID = "20261121-080000-tiny-llama-be57"
WARM_ID = "20261121-080001-tiny-llama-0001"
COLD_IDS = ["20261121-080100-tiny-llama-c001", "20261121-080110-tiny-llama-c002"]
NOW_S = 40
BATCHES, PRECISIONS, CHECKPOINTINGS = (4, 8, 16), ("fp32", "bf16"), ("off", "full")
BASELINE = 2
"""batch_size=8 precision=fp32 checkpointing=off."""
FASTEST = 6
"""batch_size=4 precision=bf16 checkpointing=off."""


def a_question(**changes: Any) -> BestQuestion:
    """tiny-llama under 1 GiB at its own global batch."""
    spec = resolve("tiny-llama", ["memory_limit=1GiB"])
    fields: dict[str, Any] = {
        **spec.record_fields(),
        "t_ns": START_NS,
        "search_id": BEST_ID,
        "key": "k",
        "vary": {
            "batch_size": list(BATCHES),
            "precision": list(PRECISIONS),
            "checkpointing": list(CHECKPOINTINGS),
        },
        "global_batch": 16,
        "budget_s": 600.0,
        "limits_bytes": [GIB],
        "clock": ClockAnchor(monotonic_ns=START_NS, wall_ns=WALL_NS),
    }
    return BestQuestion(**{**fields, **changes})


def a_space(candidates: list[Candidate] | None = None) -> Space:
    """Twelve settings, of which the largest batch without checkpointing is too large in fp32."""
    found = []
    for precision, batch, checkpointing in product(PRECISIONS, BATCHES, CHECKPOINTINGS):
        needed = (100 + 40 * batch // (1 if checkpointing == "off" else 3)) * MIB
        if precision == "fp32":
            needed *= 2
        excess = needed - GIB
        found.append(
            Candidate(
                knobs={
                    "batch_size": batch,
                    "grad_accum": 16 // batch,
                    "precision": precision,
                    "checkpointing": checkpointing,
                },
                predicted_bytes=needed,
                excess_bytes=excess if excess > 0 else None,
                samples_per_step=16,
                excluded_as="too_large" if excess > 0 else None,
                reason=f"{excess // MIB} MiB too large" if excess > 0 else "",
            )
        )
    return Space(t_ns=START_NS + 2 * S, candidates=candidates or found, baseline_number=BASELINE, dropped=3)


SPACE = a_space()


def a_trial(number: int, rate: float, at: int, *, outcome: str = "measured", warm: bool = True, **more: Any) -> Trial:
    """A trial of eight steps at this rate, its memory as predicted and 3 % more."""
    step_ms = 16_000 / rate
    fields: dict[str, Any] = {
        "t_ns": START_NS + at * S,
        "candidate_number": number,
        "run_id": WARM_ID,
        "outcome": outcome,
        "warm": warm,
        "samples_per_step": 16,
        "step_ms": [step_ms * (1 + 0.01 * ((place * 3) % 5 - 2)) for place in range(8)],
        "peak_allocated_bytes": int((SPACE.candidates[number].predicted_bytes or 0) * 1.03),
        "seconds": 3.2 if warm else 7.5,
    }
    if outcome == "oom":
        fields |= {"step_ms": [], "peak_allocated_bytes": None, "reason": "ran out of memory in backward"}
    return Trial(**{**fields, **more})


def chosen(at: int, action: str, candidate: int | None, why: str, **more: Any) -> BestStep:
    """The step chosen `at` seconds after the start."""
    return BestStep(t_ns=START_NS + at * S, action=action, candidate_number=candidate, why=why, **more)


CONDUCTED = Conducted(t_ns=START_NS, pid=1, start_ticks=1, boot_id="")
LEADING: dict[str, Any] = {"leader_number": 6, "rate": 61.0, "low": 59.4, "high": 62.6, "chance": 0.31, "price_s": 95.0}


def best_going_on() -> list[Any]:
    """Four settings tried, one out of memory, the sixth under way."""
    return [
        a_question(),
        CONDUCTED,
        SPACE,
        BestLaunched(t_ns=START_NS + 3 * S, run_id=WARM_ID, role=TRIAL, candidate_number=BASELINE),
        ProcessReady(t_ns=START_NS + 8 * S, run_id=WARM_ID, process_knobs={}, start_s=5.0),
        chosen(8, "trial", BASELINE, "the baseline comes first"),
        a_trial(BASELINE, 42.0, 15, warm=False),
        chosen(15, "trial", 3, "checkpointing=full is untried", leader_number=2, rate=42.0, low=41.0, high=43.0),
        a_trial(3, 33.5, 19),
        chosen(19, "trial", 6, "precision=bf16 is untried", leader_number=2, rate=42.0, low=41.2, high=42.8),
        a_trial(6, 61.0, 23),
        chosen(23, "trial", 10, "batch_size=16 is untried", **LEADING),
        a_trial(10, 60.0, 27, outcome="oom"),
        chosen(27, "trial", 8, "batch_size=8 is untried with bf16", **LEADING),
        a_trial(8, 52.0, 31),
        chosen(31, "trial", 11, "it may be 4 % faster than the best", **LEADING),
    ]


def best_answered(**changes: Any) -> list[Any]:
    """The whole search, with its answer."""
    cold_runs = [
        ColdRun(
            t_ns=START_NS + (36 + 2 * place) * S,
            candidate_number=number,
            role="confirm",
            run_id=run_id,
            outcome="measured",
            samples_per_s=rate,
            mad=0.4,
            start_s=3.0,
            peak_allocated_bytes=int((SPACE.candidates[number].predicted_bytes or 0) * 1.02),
            seconds=9.0,
        )
        for place, (number, run_id, rate) in enumerate([(FASTEST, COLD_IDS[0], 60.5), (BASELINE, COLD_IDS[1], 41.9)])
    ]
    verdicts = ["measured" if number in (2, 3, 6, 8, 11) else "beaten" for number in range(12)]
    verdicts[10] = "too_large"
    fields: dict[str, Any] = {
        "best_number": FASTEST,
        "best_rate": Interval(median=60.5, low=59.9, high=61.1),
        "baseline_rate": Interval(median=41.9, low=41.3, high=42.5),
        "gain_percent": Interval(median=44.4, low=42.1, high=46.8),
        "best_run_ids": COLD_IDS[:1],
        "baseline_run_ids": COLD_IDS[1:],
        "tied_numbers": [11],
        "effects": [
            effect("precision", "bf16", "fp32", 44.4, measured=True),
            effect("batch_size", 4, 8, 17.2),
            effect("batch_size", 16, 8, 0.6),
            effect("checkpointing", "full", "off", -20.3),
        ],
        "verdicts": [
            CandidateVerdict(candidate_number=number, verdict=verdict, reason="as measured")
            for number, verdict in enumerate(verdicts)
        ],
        "pareto_numbers": [6, 8],
        "notes": ["two of 6 trials were disturbed by other processes"],
    }
    return [
        *best_going_on(),
        a_trial(11, 60.1, 35),
        *cold_runs,
        chosen(40, "end", None, "the best is confirmed"),
        BestEnded(t_ns=START_NS + 41 * S, state="answered", answer=BestAnswer(**{**fields, **changes}), seconds=41.0),
    ]


def effect(knob: str, value: object, before: object, gain: float, *, measured: bool = False) -> Effect:
    """A gain in percent, known within 2.5 %."""
    interval = Interval(median=gain, low=gain - 2.5, high=gain + 2.5)
    return Effect(knob=knob, value=value, before=before, gain_percent=interval, measured=measured)


def a_best_search(home: Home, lines: list[Any]) -> Path:
    """Its directory; the holder of `search.lock` there conducts it."""
    directory = home.path / "searches" / BEST_ID
    directory.mkdir(parents=True)
    write_lines(directory / "journal.jsonl", lines)
    (directory / "search.lock").touch(mode=0o600)
    return directory


def best_seen(directory: Path) -> BestSnapshot:
    """The search as the reader sees it."""
    return BestFollower(directory).poll()


async def show_best(pilot: Pilot[Any], search: Path | None) -> str:
    """Give the app the reader's next snapshot; return the screen's text."""
    found = None if search is None else best_seen(search)
    pilot.app.post(SnapshotTaken(replace(a_snapshot(None, second=NOW_S), best_search=found)))
    await pilot.pause()
    return screen_text(pilot.app)  # type: ignore[arg-type]


async def best_opened(pilot: Pilot[Any], search: Path | None) -> str:
    """Open the screen of this search with `B`; return its text."""
    await show_best(pilot, search)
    await pilot.press("B")
    await pilot.pause()
    assert isinstance(pilot.app, StillApp)
    assert isinstance(pilot.app.screen, BestScreen)
    return screen_text(pilot.app)
