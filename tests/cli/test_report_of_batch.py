"""`report SEARCH` of a batch search: the sizes it tried, its fit and its confirmation run."""

from __future__ import annotations

import fcntl
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cli.command import Cli
from cli.test_report import (
    EVIL,
    MIB,
    RECORDED,
    assert_loads_nothing,
    assert_tables_are_even,
    markdown_of,
    page_of,
)
from trainfast_runner.records.run_file import ClockAnchor
from trainfast_runner.search.journal.batch import (
    BatchAnswer,
    BatchEnded,
    BatchQuestion,
    BatchStep,
    ConfirmationRun,
    Probe,
)
from trainfast_runner.search.journal.fitted_memory import MemoryFit, PhaseFit
from trainfast_runner.settings.spec import resolve

SEARCH_ID = "20261121-070000-tiny-llama-5ea2"


@pytest.fixture
def searched(cli: Cli) -> Cli:
    """A history with a search that found 42, refuted nothing, and whose confirmation run is the recorded one."""
    shutil.copytree(RECORDED, cli.home / "runs" / RECORDED.name)
    spec, clock = resolve("tiny-llama", ["memory_limit=1GiB"]), ClockAnchor(monotonic_ns=0, wall_ns=0)
    line = PhaseFit(phase="forward_backward", fixed_bytes=118 * MIB, bytes_per_sample=21.5 * MIB)
    fit = MemoryFit(rank=0, lines=[line], limit_bytes=1024 * MIB)
    probed: dict[str, Any] = {"run_id": "20261121-070002-tiny-llama-b001", "seconds": 4.0}
    lines = [
        BatchQuestion(
            search_id=SEARCH_ID,
            key="k",
            preset="tiny-llama",
            model=spec.model,
            data=spec.data,
            knobs=spec.knobs,
            limits_bytes=[1024 * MIB],
            limit_words="memory_limit",
            clock=clock,
        ),
        *(
            Probe(
                t_ns=size,
                batch_size=size,
                outcome="fits",
                peak_allocated_bytes=int((118 + 21.5 * size) * MIB),
                **probed,
            )
            for size in (8, 32)
        ),
        BatchStep(t_ns=40, action="probe", batch_size=42, why="the fit reaches the limit at 42.1", memory_fits=[fit]),
        Probe(t_ns=44, batch_size=44, outcome="oom", reason=EVIL, peak_allocated_bytes=1020 * MIB, **probed),
        ConfirmationRun(
            t_ns=46,
            batch_size=43,
            run_id="20261121-000000-stopped-00aa",
            state="stopped",
            peak_allocated_bytes=1019 * MIB,
            seconds=2.0,
        ),
        ConfirmationRun(
            t_ns=50,
            batch_size=42,
            run_id=RECORDED.name,
            state="finished",
            peak_allocated_bytes=1021 * MIB,
            step_ms=1661.0,
            seconds=9.0,
        ),
        BatchEnded(
            t_ns=60,
            state="answered",
            answer=BatchAnswer(
                max_batch=42,
                recommended_batch=40,
                recommended_why="leaves 46 MiB",
                limit_bytes=1024 * MIB,
                headroom_bytes=3 * MIB,
                confirmation_run_id=RECORDED.name,
                certainty="44 ran out of memory",
            ),
            seconds=35.0,
        ),
    ]
    directory = cli.home / "searches" / SEARCH_ID
    directory.mkdir(parents=True)
    (directory / "journal.jsonl").write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in lines))
    return cli


def test_a_batch_search_has_its_sizes_its_fit_and_its_confirmation_run(searched: Cli, tmp_path: Path) -> None:
    page = page_of(searched, tmp_path, SEARCH_ID)
    assert_loads_nothing(page)
    tried = next(table for table in page.tables if table[0][0] == "batch size")
    assert [row[0] for row in tried[1:]] == ["8", "32", "44", "43", "42"]
    assert tried[-1][tried[0].index("step")] == "1,661 ms", "the median of the confirmation run's result"
    for words in (
        f"42, confirmed by {RECORDED.name}; 44 ran out of memory",
        "fit, the highest phase",
        "limit 1.00 GiB",
        "the recommended one is 40",
        "TrainingArguments(",
    ):
        assert words in page.text
    assert re.search(r"batch size 44: [\d.,]+ MiB, out of memory", page.source)
    assert "batch size 43:" not in page.source, "a stopped run is no point of the picture"
    markdown = markdown_of(searched, tmp_path, SEARCH_ID[:16])
    assert_tables_are_even(markdown)
    assert "Picture left out: peak memory by batch size" in markdown


def test_a_search_that_goes_on_is_reported_as_live(searched: Cli, tmp_path: Path) -> None:
    with (searched.home / "searches" / SEARCH_ID / "search.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "The search is still running" in markdown_of(searched, tmp_path, SEARCH_ID)
    assert "still running" not in markdown_of(searched, tmp_path, SEARCH_ID)


def test_a_search_stands_alone_and_the_nearest_is_named(searched: Cli, tmp_path: Path) -> None:
    file = str(tmp_path / "report.md")
    assert "exactly one search" in searched("report", SEARCH_ID, "last", "-o", file).refused()
    assert f"did you mean {SEARCH_ID}?" in searched("report", SEARCH_ID.replace("llama", "lama"), "-o", file).refused()
    assert "matches 2 runs and searches" in searched("report", "20261121-", "-o", file).refused()
