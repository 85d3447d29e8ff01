"""Two starters of one search: the second follows the conductor of the first."""

from __future__ import annotations

from pathlib import Path

from trainfast_runner.records.home import Home
from trainfast_runner.records.search_directories import PAUSE_FILE, conductor_lock
from trainfast_runner.search.__main__ import conduct_request
from trainfast_runner.search.best.planning.opening import open_best
from trainfast_runner.search.best.planning.plan_preset import plan_preset_best
from trainfast_runner.search.best.planning.request import BestRequest
from trainfast_runner.search.control import SearchRequest, pause
from trainfast_runner.search.journal.best import read_best_journal
from trainfast_runner.search.options import SearchOptions
from trainfast_runner.settings.spec import resolve


def test_a_search_that_another_process_conducts_is_followed_and_stays_as_it_is(tmp_path: Path) -> None:
    home, options = Home(tmp_path), SearchOptions()
    spec = resolve("tiny-llama", ["data.kind=random", "seq_len=32"])
    asked = BestRequest(vary={"precision": ["fp32", "bf16"]})
    directory = open_best(plan_preset_best(spec, asked, options), home, options)
    pause(directory)
    before = read_best_journal(directory)
    request = SearchRequest(home=str(home.path), **spec.record_fields(), best=asked)
    followed: list[Path] = []
    with conductor_lock(directory):
        conduct_request(request, followed.append, is_cancelled=lambda: False, began_ns=0)
    assert followed == [directory]
    assert (directory / PAUSE_FILE).exists(), "the first one's pause holds"
    assert read_best_journal(directory) == before
