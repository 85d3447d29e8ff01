"""`search best`: what is refused or only counted before anything starts; cli/transcripts has the refused questions."""

import pytest

from cli.command import SMALL
from trainfast_runner.errors import UserError
from trainfast_runner.records.home import PAUSE_FILE, Home, conductor_lock
from trainfast_runner.search.best.question import open_best, plan_preset_best
from trainfast_runner.search.best_journal import BestJournal, BestRequest
from trainfast_runner.search.control import SearchRequest, conduct_request, pause
from trainfast_runner.search.searches import SearchOptions
from trainfast_runner.settings.spec import resolve

BEST = ("search", "best", "tiny-llama", *SMALL)


def test_advice_on_a_knob_that_cannot_be_varied_reads_well_on_a_screen():
    with pytest.raises(UserError, match="devices cannot be varied") as refused:
        plan_preset_best(resolve("tiny-llama", []), BestRequest(vary={"devices": ["1", "2"]}))
    assert refused.value.line_without_option().endswith("; try setting devices for the next run")


def test_a_dry_run_counts_and_starts_nothing(cli):
    done = cli(*BEST, "--vary", "batch_size=1,2,4", "--vary", "precision=fp32,bf16", "--global-batch", "4", "--dry-run")
    assert done.code == 0, done.err
    assert "6" in done.out
    assert "cold runs" in done.out
    found = cli(*BEST, "--vary", "batch_size=1,2,4", "--global-batch", "4", "--dry-run", "--json").json
    assert (found["candidates"], found["legal"], found["seconds"]) == (3, 3, 600)
    assert Home(cli.home).run_ids() == []


def test_without_vary_only_what_trains_the_same_is_varied(cli):
    found = cli(*BEST, "--dry-run", "--json").json
    assert "precision" in found["vary"]
    assert not {"lr", "seq_len", "seed"} & set(found["vary"])
    assert {"lr", "seq_len"} <= set(found["left_alone"])
    assert "bf16-pure" not in found["vary"]["precision"]
    assert found["global_batch"] == 2


def test_a_search_that_another_process_conducts_is_followed_and_stays_as_it_is(tmp_path):
    home, options = Home(tmp_path), SearchOptions()
    spec = resolve("tiny-llama", ["data.kind=random", "seq_len=32"])
    asked = BestRequest(vary={"precision": ["fp32", "bf16"]})
    directory = open_best(plan_preset_best(spec, asked), home, options)
    pause(directory)
    before = BestJournal.read(directory).lines
    request = SearchRequest(home=str(home.path), **spec.record_fields(), best=asked)
    followed = []
    with conductor_lock(directory):
        conduct_request(request, followed.append, is_cancelled=lambda: False, began_ns=0)
    assert followed == [directory]
    assert (directory / PAUSE_FILE).exists(), "the first one's pause holds"
    assert BestJournal.read(directory).lines == before
