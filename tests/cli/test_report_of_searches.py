"""`report SEARCH`: sizes and confirmation of a batch search; front, effects and verdicts of a best-fit one."""

import fcntl
import re
import shutil

import pytest
from msgspec.structs import replace
from recorded import BEST_ID, COLD_IDS, CONFIRMATION_ID, MIB, SEARCH_ID, SPACE, answered, best_answered

from cli.test_report import EVIL, assert_loads_nothing, assert_tables_are_even, markdown_of, page_of
from on_disk import RECORDED, search
from trainfast_runner.search.best_journal import BestEnded


@pytest.fixture
def searched(cli):
    """A history with both searches, whose runs are copies of the recorded one and whose texts are no page's."""
    for run_id in (CONFIRMATION_ID, *COLD_IDS):
        result = shutil.copytree(RECORDED, cli.home / "runs" / run_id) / "result.json"
        result.write_text(result.read_text().replace(RECORDED.name, run_id))
    *tried, oom, confirmation, last, ended = answered()
    search(cli.home, *tried, replace(oom, reason=EVIL), replace(confirmation, step_ms=1661.0), last, ended)
    asked, *lines = best_answered()
    search(cli.home, replace(asked, title=EVIL), *lines, search_id=BEST_ID)
    return cli


def test_a_batch_search_has_its_sizes_and_its_confirmation_run(searched, tmp_path):
    page = page_of(searched, tmp_path, SEARCH_ID)
    assert_loads_nothing(page)
    tried = next(table for table in page.tables if table[0][0] == "batch size")
    assert [row[0] for row in tried[1:]] == ["8", "32", "42", "44", "42"]
    assert tried[-1][tried[0].index("step")] == "1,661 ms", "the median of the confirmation run's result"
    for words in (
        f"42, confirmed by {CONFIRMATION_ID}; 44 ran out of memory",
        "the recommended one is 40",
        "TrainingArguments(",
    ):
        assert words in page.text
    markdown = markdown_of(searched, tmp_path, SEARCH_ID[:16])
    assert_tables_are_even(markdown)
    assert re.search(r"^\| 8 \| probe \| fits \| 290 MiB \|", markdown, re.MULTILINE)


def test_a_search_that_goes_on_is_reported_as_live(searched, tmp_path):
    with (searched.home / "searches" / SEARCH_ID / "search.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "The search is still running" in markdown_of(searched, tmp_path, SEARCH_ID)
    assert "still running" not in markdown_of(searched, tmp_path, SEARCH_ID)


def test_a_search_stands_alone_and_the_nearest_is_named(searched, tmp_path):
    file = str(tmp_path / "report.md")
    assert "exactly one search" in searched("report", SEARCH_ID, "last", "-o", file).refused()
    assert f"did you mean {SEARCH_ID}?" in searched("report", SEARCH_ID.replace("llama", "lama"), "-o", file).refused()
    assert "runs and searches" in searched("report", "20261121-", "-o", file).refused()


def test_a_best_fit_search_has_its_front_effects_verdicts_and_exports(searched, tmp_path):
    page = page_of(searched, tmp_path, BEST_ID)
    assert_loads_nothing(page)
    verdicts = next(table for table in page.tables if "verdict" in table[0])
    assert {row[2] for row in verdicts[1:]} == {"measured", "beaten", "too large"}
    assert {row[3] for row in verdicts[1:] if row[2] == "beaten"} == {"–"}, "what was not measured has no figure"
    for words in (
        "batch_size=4 grad_accum=4 precision=bf16",
        "+44.4 % (+42.1 % to +46.8 %)",
        "60.5 samples/s (59.9 to 61.1)",
        "12: 5 measured, 6 beaten, 1 too large; another global batch: 3 combinations",
        "fastest in its memory",
        "two of 6 trials were disturbed by other processes",
    ):
        assert words in page.text, words
    assert page.text.count("TrainingArguments(") == 1, "only the winner's settings are exported"
    assert "<script>alert(1)</script>" in page.text
    markdown = markdown_of(searched, tmp_path, BEST_ID)
    assert_tables_are_even(markdown)
    assert markdown.count("\n| ---") == len(page.tables)
    assert "<script" not in markdown


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tried_in_budget": 3}, r"3 of 12 tried when the budget ended(.|\n)*^\| best so far \|.*precision=bf16"),
        (
            {"within_percent": 8.0},
            r"within 8.0 %, the noise of this machine: no setting is faster(.|\n)*\n\| chosen \|",
        ),
    ],
)
def test_an_answer_without_a_winner_is_reported_as_such(cli, tmp_path, changes, words):
    search(cli.home, *best_answered(**changes), search_id=BEST_ID)
    assert re.search(words, markdown_of(cli, tmp_path, BEST_ID), re.MULTILINE)


def test_a_search_in_which_nothing_fits_says_by_how_much(cli, tmp_path):
    asked, conducted, space, *_ = best_answered()
    ended = BestEnded(state="nothing_fits", reason="every candidate is too large", missing_bytes=300 * MIB)
    search(cli.home, asked, conducted, space, ended, search_id=BEST_ID)
    page = page_of(cli, tmp_path, BEST_ID)
    assert "At least 300 MiB are missing." in page.text
    verdicts = next(table for table in page.tables if "verdict" in table[0])
    assert len(verdicts) == 1 + len(SPACE.candidates), "every candidate has a verdict all the same"
    assert "no machine, chart or export here" in page.text
