"""`report SEARCH` of a best-fit search: its front, its effects, a verdict for each candidate, the winner's export."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cli.command import Cli
from cli.test_report import EVIL, MIB, RECORDED, assert_loads_nothing, assert_tables_are_even, markdown_of, page_of
from trainfast_runner.records.run_file import ClockAnchor, PredictedSpeed
from trainfast_runner.search.journal.best import (
    BestAnswer,
    BestEnded,
    BestLine,
    BestQuestion,
    Candidate,
    CandidateVerdict,
    ColdRun,
    EarlierEffect,
    Effect,
    Interval,
    Space,
    Trial,
)
from trainfast_runner.settings.spec import resolve

SEARCH_ID = "20261121-080000-tiny-llama-be57"
BASELINE_RUN = "20261121-133323-tiny-llama-ba5e"
KNOBS = [
    {"batch_size": 8, "grad_accum": 4, "precision": "fp32"},
    {"batch_size": 16, "grad_accum": 2, "precision": "fp32"},
    {"batch_size": 16, "grad_accum": 2, "precision": "bf16"},
    {"batch_size": 32, "grad_accum": 1, "precision": "bf16"},
    {"batch_size": 64, "grad_accum": 1, "precision": "fp32"},
]
PEAKS = {0: 200 * MIB, 1: 300 * MIB, 2: 260 * MIB}


def between(median: float, apart: float = 1.0) -> Interval:
    return Interval(median=median, low=median - apart, high=median + apart)


def question() -> BestQuestion:
    spec = resolve("tiny-llama", ["memory_limit=1GiB"])
    return BestQuestion(
        search_id=SEARCH_ID,
        key="k",
        preset="tiny-llama",
        title=EVIL,
        model=spec.model,
        data=spec.data,
        knobs=spec.knobs,
        vary={"batch_size": [8, 16, 32, 64], "precision": ["fp32", "bf16"]},
        left_alone={"lr": "another value trains differently"},
        global_batch=32,
        limits_bytes=[1024 * MIB],
        earlier=[
            EarlierEffect(knob="precision", value="bf16", before="fp32", gain_percent=between(9.0), search_id="earlier")
        ],
        clock=ClockAnchor(monotonic_ns=0, wall_ns=0),
    )


def answer(**changes: Any) -> BestAnswer:
    """Candidate 2 won; 3 was beaten without a run, 4 is too large."""
    given: dict[str, Any] = {
        "best_number": 2,
        "best_rate": between(60.0),
        "baseline_rate": between(50.0),
        "gain_percent": Interval(median=20.0, low=16.5, high=23.4),
        "best_run_ids": [RECORDED.name],
        "baseline_run_ids": [BASELINE_RUN],
        "tied_numbers": [1],
        "effects": [
            Effect(knob="precision", value="bf16", before="fp32", gain_percent=between(14.0), measured=True),
            Effect(knob="batch_size", value=16, before=8, gain_percent=between(-2.0, 5.0)),
        ],
        "verdicts": [
            CandidateVerdict(
                candidate_number=0, verdict="measured", reason="-16.7 % against the best", rate=between(50.0)
            ),
            CandidateVerdict(candidate_number=1, verdict="measured", reason=EVIL, rate=between(55.0)),
            CandidateVerdict(candidate_number=2, verdict="measured", reason="the best", rate=between(60.0)),
            CandidateVerdict(
                candidate_number=3, verdict="beaten", reason="0.4 % chance of being 2 % better than the best"
            ),
            CandidateVerdict(candidate_number=4, verdict="too_large", reason="needs 300 MiB more"),
        ],
        "pareto_numbers": [2, 0],
        "notes": ["a warm trial was 4 % faster than a fresh process"],
    }
    return BestAnswer(**{**given, **changes})


def journal(ended: BestEnded) -> list[BestLine]:
    trials: list[BestLine] = [
        Trial(
            t_ns=10 + place,
            candidate_number=place,
            run_id="warm",
            outcome="measured",
            warm=place > 0,
            samples_per_step=32,
            step_ms=[600.0, 610.0, 630.0, 640.0],
            peak_allocated_bytes=peak,
            seconds=3.0,
        )
        for place, peak in PEAKS.items()
    ]
    space = Space(
        t_ns=1,
        candidates=[Candidate(knobs=knobs, predicted_bytes=250 * MIB) for knobs in KNOBS],
        baseline_number=0,
        dropped=7,
    )
    race = ColdRun(
        t_ns=20,
        candidate_number=2,
        role="confirm",
        run_id=RECORDED.name,
        outcome="measured",
        samples_per_s=60.0,
        predicted=PredictedSpeed(median=58.0, low=54.0, high=63.0),
        seconds=9,
    )
    return [question(), space, *trials, race, ended]


@pytest.fixture
def home(cli: Cli) -> Cli:
    """A history with the winner's and the baseline's run."""
    for run_id in (RECORDED.name, BASELINE_RUN):
        shutil.copytree(RECORDED, cli.home / "runs" / run_id)
    result = cli.home / "runs" / BASELINE_RUN / "result.json"
    result.write_text(result.read_text().replace(RECORDED.name, BASELINE_RUN))
    return cli


def write(cli: Cli, ended: BestEnded) -> None:
    directory = cli.home / "searches" / SEARCH_ID
    directory.mkdir(parents=True)
    lines = b"".join(msgspec.json.encode(line) + b"\n" for line in journal(ended))
    (directory / "journal.jsonl").write_bytes(lines)


def test_a_best_fit_search_has_its_front_effects_verdicts_and_exports(home: Cli, tmp_path: Path) -> None:
    write(
        home,
        BestEnded(state="answered", stopped_because="nothing left is likely to win", answer=answer(), seconds=95.0),
    )
    page = page_of(home, tmp_path, SEARCH_ID)
    assert_loads_nothing(page)
    verdicts = next(table for table in page.tables if "verdict" in table[0])
    assert [row[2] for row in verdicts[1:]] == ["measured", "measured", "measured", "beaten", "too large"]
    assert [row[3] for row in verdicts[4:]] == ["–", "–"], "what was not measured has no figure"
    tried = next(table for table in page.tables if "predicted (90 %)" in table[0])
    assert tried[1][3:7] == ["51.6", "–", "620 ms", "4"], "the median of an even number of steps"
    assert [row[3:5] for row in tried[3:]] == [[tried[3][3], "–"], ["60.0", "58.0 (54.0 to 63.0)"]]
    for words in (
        "batch_size=16 grad_accum=2 precision=bf16",
        "+20.0 % (+16.5 % to +23.4 %)",
        "60.0 samples/s (59.0 to 61.0)",
        "another value trains differently",
        "the same as the baseline, counting precision=bf16 as the same as fp32",
        "5: 3 measured, 1 beaten, 1 too large; another global batch: 7 combinations",
        "throughput by peak memory of each measured setting",
        "behind the front",
        "gain of each value over the baseline's",
        "a warm trial was 4 % faster than a fresh process",
        "nothing left is likely to win",
        "TrainingArguments(",
    ):
        assert words in page.text, words
    assert page.text.count("TrainingArguments(") == 1, "only the winner's settings are exported"
    assert "<script>alert(1)</script>" in page.text


def test_a_search_of_a_script_that_its_budget_ended_says_how_far_it_came(home: Cli, tmp_path: Path) -> None:
    found = answer(tried_in_budget=3)
    directory = home.home / "searches" / SEARCH_ID
    write(home, BestEnded(state="answered", stopped_because="the budget of 120 s", answer=found))
    lines = [
        msgspec.structs.replace(question(), model={}),
        *journal(BestEnded(state="answered", answer=found))[1:],
    ]
    (directory / "journal.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    page = page_of(home, tmp_path, SEARCH_ID)
    assert "3 of 5 tried when the budget ended" in page.text
    best = next(row for table in page.tables for row in table if row[0] == "best so far")
    assert "batch_size=16 grad_accum=2 precision=bf16" in best[1]
    tried = next(table for table in page.tables if "predicted (90 %)" in table[0])
    assert [row[1] for row in tried[1:]] == ["trial", "trial", "trial", "confirm"], "a script has no warm process"


def test_its_markdown_has_the_same_tables(home: Cli, tmp_path: Path) -> None:
    write(home, BestEnded(state="answered", stopped_because="nothing left is likely to win", answer=answer()))
    page, markdown = page_of(home, tmp_path, SEARCH_ID), markdown_of(home, tmp_path, SEARCH_ID)
    assert_tables_are_even(markdown)
    assert markdown.count("\n| ---") == len(page.tables)
    assert "<script" not in markdown


@pytest.mark.parametrize(("limit_bytes", "is_drawn"), [(1024 * MIB, True), (60 * 1024 * MIB, False)])
def test_a_far_limit_is_named_beside_the_picture_and_does_not_flatten_it(
    home: Cli, tmp_path: Path, limit_bytes: int, is_drawn: bool
) -> None:
    ended = BestEnded(state="answered", stopped_because="nothing left is likely to win", answer=answer())
    lines = [msgspec.structs.replace(question(), limits_bytes=[limit_bytes]), *journal(ended)[1:]]
    directory = home.home / "searches" / SEARCH_ID
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "journal.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    text = page_of(home, tmp_path, SEARCH_ID).text
    assert ("The limit, 60.0 GiB, is far right of the picture." in text) is not is_drawn
    assert ("limit 1.00 GiB" in text) is is_drawn


def test_noise_that_decides_is_reported(home: Cli, tmp_path: Path) -> None:
    found = answer(within_percent=8.0, gain_percent=Interval(median=3.0, low=-5.0, high=11.0))
    write(home, BestEnded(state="answered", answer=found))
    page = page_of(home, tmp_path, SEARCH_ID)
    assert "within 8.0 %, the noise of this machine: no setting is faster beyond it" in page.text
    assert any(row[0] == "chosen" for table in page.tables for row in table)


def test_a_search_in_which_nothing_fits_says_by_how_much(home: Cli, tmp_path: Path) -> None:
    write(home, BestEnded(state="nothing_fits", reason="every candidate is too large", missing_bytes=300 * MIB))
    page = page_of(home, tmp_path, SEARCH_ID)
    assert "At least 300 MiB are missing." in page.text
    verdicts = next(table for table in page.tables if "verdict" in table[0])
    assert len(verdicts) == 1 + len(KNOBS), "every candidate has a verdict all the same"
    assert "no machine, chart or export here" in page.text
