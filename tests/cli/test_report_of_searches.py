"""`report SEARCH`: sizes and confirmation of a batch search; front, effects and verdicts of a best-fit one."""

import fcntl
import re
import shutil
from typing import Any

import msgspec
import pytest

from cli.command import Cli
from cli.test_report import EVIL, MIB, assert_loads_nothing, assert_tables_are_even, markdown_of, page_of
from on_disk import CLOCK, RECORDED, SEARCH, batch_question, search
from trainfast_runner.records.run_file import PredictedSpeed
from trainfast_runner.search.batch_journal import BatchAnswer, BatchEnded, BatchStep, ConfirmationRun, Probe
from trainfast_runner.search.best_journal import (
    BestAnswer,
    BestEnded,
    BestLine,
    BestQuestion,
    Candidate,
    CandidateVerdict,
    ColdRun,
    Effect,
    Interval,
    Space,
    Trial,
)
from trainfast_runner.search.fitted_memory import MemoryFit, PhaseFit
from trainfast_runner.settings.spec import resolve


@pytest.fixture
def searched(cli):
    """A history with a search that found 42, refuted nothing, and whose confirmation run is the recorded one."""
    shutil.copytree(RECORDED, cli.home / "runs" / RECORDED.name)
    spec, warm = resolve("tiny-llama", ["memory_limit=1GiB"]), "20261121-070002-tiny-llama-b001"

    def probe(size, outcome="fits", peak_mib=None, **fields) -> Probe:
        peak = int((peak_mib or 118 + 21.5 * size) * MIB)
        sizes = {"t_ns": size, "batch_size": size, "peak_allocated_bytes": peak}
        return Probe(outcome=outcome, run_id=warm, seconds=4.0, **sizes, **fields)

    def confirmation(t_ns, size, run_id, state, peak_mib, **fields) -> ConfirmationRun:
        sizes = {"t_ns": t_ns, "batch_size": size, "peak_allocated_bytes": peak_mib * MIB, "seconds": 2.0}
        return ConfirmationRun(run_id=run_id, state=state, **sizes, **fields)

    line = PhaseFit(phase="forward_backward", fixed_bytes=118 * MIB, bytes_per_sample=21.5 * MIB)
    fit = MemoryFit(rank=0, lines=[line], limit_bytes=1024 * MIB)
    limit = {"limits_bytes": [1024 * MIB], "limit_words": "memory_limit"}
    found = {"max_batch": 42, "recommended_batch": 40, "recommended_why": "leaves 46 MiB"}
    found |= {"limit_bytes": 1024 * MIB, "headroom_bytes": 3 * MIB, "certainty": "44 ran out of memory"}
    search(
        cli.home,
        batch_question(model=spec.model, data=spec.data, knobs=spec.knobs, **limit),
        *(probe(size) for size in (8, 32)),
        BatchStep(t_ns=40, action="probe", batch_size=42, why="the fit reaches the limit at 42.1", memory_fits=[fit]),
        probe(44, "oom", 1020, reason=EVIL),
        confirmation(46, 43, "20261121-000000-stopped-00aa", "stopped", 1019),
        confirmation(50, 42, RECORDED.name, "finished", 1021, step_ms=1661.0),
        BatchEnded(
            t_ns=60, state="answered", answer=BatchAnswer(confirmation_run_id=RECORDED.name, **found), seconds=35.0
        ),
    )
    return cli


def test_a_batch_search_has_its_sizes_and_its_confirmation_run(searched, tmp_path):
    page = page_of(searched, tmp_path, SEARCH)
    assert_loads_nothing(page)
    tried = next(table for table in page.tables if table[0][0] == "batch size")
    assert [row[0] for row in tried[1:]] == ["8", "32", "44", "43", "42"]
    assert tried[-1][tried[0].index("step")] == "1,661 ms", "the median of the confirmation run's result"
    for words in (
        f"42, confirmed by {RECORDED.name}; 44 ran out of memory",
        "the recommended one is 40",
        "TrainingArguments(",
    ):
        assert words in page.text
    markdown = markdown_of(searched, tmp_path, SEARCH[:16])
    assert_tables_are_even(markdown)
    assert re.search(r"^\| 8 \| probe \| fits \| 290 MiB \|", markdown, re.MULTILINE)


def test_a_search_that_goes_on_is_reported_as_live(searched, tmp_path):
    with (searched.home / "searches" / SEARCH / "search.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "The search is still running" in markdown_of(searched, tmp_path, SEARCH)
    assert "still running" not in markdown_of(searched, tmp_path, SEARCH)


def test_a_search_stands_alone_and_the_nearest_is_named(searched, tmp_path):
    file = str(tmp_path / "report.md")
    assert "exactly one search" in searched("report", SEARCH, "last", "-o", file).refused()
    assert f"did you mean {SEARCH}?" in searched("report", SEARCH.replace("llama", "lama"), "-o", file).refused()
    assert "matches 2 runs and searches" in searched("report", "20261121-", "-o", file).refused()


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
    asked = {"vary": {"batch_size": [8, 16, 32, 64], "precision": ["fp32", "bf16"]}, "global_batch": 32}
    asked |= {"left_alone": {"lr": "another value trains differently"}, "limits_bytes": [1024 * MIB]}
    of_spec = {**spec.record_fields(), "title": EVIL}
    return BestQuestion(**of_spec, **asked, search_id=SEARCH_ID, key="k", clock=CLOCK)


def verdict(number: int, kind: str, reason: str, rate: float | None = None) -> CandidateVerdict:
    found = rate and between(rate)
    return CandidateVerdict(candidate_number=number, verdict=kind, reason=reason, rate=found)


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
            verdict(0, "measured", "-16.7 % against the best", 50.0),
            verdict(1, "measured", EVIL, 55.0),
            verdict(2, "measured", "the best", 60.0),
            verdict(3, "beaten", "0.4 % chance of being 2 % better than the best"),
            verdict(4, "too_large", "needs 300 MiB more"),
        ],
        "pareto_numbers": [2, 0],
        "notes": ["a warm trial was 4 % faster than a fresh process"],
    }
    return BestAnswer(**{**given, **changes})


ENDED = BestEnded(state="answered", stopped_because="nothing left is likely to win", answer=answer(), seconds=95.0)


def journal(ended: BestEnded, asked: BestQuestion | None = None) -> list[BestLine]:
    steps = {"outcome": "measured", "samples_per_step": 32, "step_ms": [600.0, 610.0, 630.0, 640.0], "seconds": 3.0}
    trials = [
        Trial(t_ns=10 + n, candidate_number=n, run_id="warm", warm=n > 0, peak_allocated_bytes=peak, **steps)
        for n, peak in PEAKS.items()
    ]
    candidates = [Candidate(knobs=knobs, predicted_bytes=250 * MIB) for knobs in KNOBS]
    cold = {"candidate_number": 2, "role": "confirm", "run_id": RECORDED.name, "outcome": "measured"}
    predicted = PredictedSpeed(median=58.0, low=54.0, high=63.0)
    race = ColdRun(t_ns=20, **cold, samples_per_s=60.0, predicted=predicted, seconds=9)
    space = Space(t_ns=1, candidates=candidates, baseline_number=0, dropped=7)
    return [asked or question(), space, *trials, race, ended]


@pytest.fixture
def home(cli: Cli) -> Cli:
    """A history with the winner's and the baseline's run."""
    for run_id in (RECORDED.name, BASELINE_RUN):
        shutil.copytree(RECORDED, cli.home / "runs" / run_id)
    result = cli.home / "runs" / BASELINE_RUN / "result.json"
    result.write_text(result.read_text().replace(RECORDED.name, BASELINE_RUN))
    return cli


def write(cli: Cli, ended: BestEnded = ENDED, **asked: Any) -> None:
    search(cli.home, *journal(ended, msgspec.structs.replace(question(), **asked)), search_id=SEARCH_ID)


def test_a_best_fit_search_has_its_front_effects_verdicts_and_exports(home, tmp_path):
    write(home)
    page = page_of(home, tmp_path, SEARCH_ID)
    assert_loads_nothing(page)
    verdicts = next(table for table in page.tables if "verdict" in table[0])
    assert [row[2] for row in verdicts[1:]] == ["measured", "measured", "measured", "beaten", "too large"]
    assert [row[3] for row in verdicts[4:]] == ["–", "–"], "what was not measured has no figure"
    for words in (
        "batch_size=16 grad_accum=2 precision=bf16",
        "+20.0 % (+16.5 % to +23.4 %)",
        "60.0 samples/s (59.0 to 61.0)",
        "another value trains differently",
        "the same as the baseline, counting precision=bf16 as the same as fp32",
        "5: 3 measured, 1 beaten, 1 too large; another global batch: 7 combinations",
        "fastest in its memory",
        "+14.0 % (+13.0 % to +15.0 %)",
        "a warm trial was 4 % faster than a fresh process",
        "nothing left is likely to win",
        "TrainingArguments(",
    ):
        assert words in page.text, words
    assert page.text.count("TrainingArguments(") == 1, "only the winner's settings are exported"
    assert "<script>alert(1)</script>" in page.text
    markdown = markdown_of(home, tmp_path, SEARCH_ID)
    assert_tables_are_even(markdown)
    assert markdown.count("\n| ---") == len(page.tables)
    assert "<script" not in markdown


def test_a_search_that_its_budget_ended_says_how_far_it_came(home, tmp_path):
    found = answer(tried_in_budget=3)
    write(home, BestEnded(state="answered", stopped_because="the budget of 120 s", answer=found), model={})
    markdown = markdown_of(home, tmp_path, SEARCH_ID)
    assert "3 of 5 tried when the budget ended" in markdown
    assert re.search(r"^\| best so far \|.*batch_size=16 grad_accum=2 precision=bf16", markdown, re.MULTILINE)


def test_noise_that_decides_is_reported(home, tmp_path):
    found = answer(within_percent=8.0, gain_percent=Interval(median=3.0, low=-5.0, high=11.0))
    write(home, BestEnded(state="answered", answer=found))
    markdown = markdown_of(home, tmp_path, SEARCH_ID)
    assert "within 8.0 %, the noise of this machine: no setting is faster beyond it" in markdown
    assert "\n| chosen |" in markdown


def test_a_search_in_which_nothing_fits_says_by_how_much(home, tmp_path):
    write(home, BestEnded(state="nothing_fits", reason="every candidate is too large", missing_bytes=300 * MIB))
    page = page_of(home, tmp_path, SEARCH_ID)
    assert "At least 300 MiB are missing." in page.text
    verdicts = next(table for table in page.tables if "verdict" in table[0])
    assert len(verdicts) == 1 + len(KNOBS), "every candidate has a verdict all the same"
    assert "no machine, chart or export here" in page.text
