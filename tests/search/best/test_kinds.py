"""A home with both kinds of search: each command and screen sees its own."""

import os
import time

import pytest

from trainfast_runner.machine.processes import boot_id
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_file import ClockAnchor
from trainfast_runner.search.batch_journal import BatchQuestion
from trainfast_runner.search.best_journal import BestEnded, BestQuestion, Trial
from trainfast_runner.search.journal import Conducted, JournalWriter
from trainfast_runner.search.searches import BATCH_KIND, BEST_KIND, first_line, new_search, newest_search, unfinished

CLOCK = ClockAnchor(monotonic_ns=0, wall_ns=time.time_ns())
CONDUCTED = Conducted(pid=os.getpid(), start_ticks=0, boot_id=boot_id())
TRIED = Trial(candidate_number=0, run_id="r", outcome="measured", warm=False, samples_per_step=8, seconds=1.0)
REFUSED = BestEnded(state="cancelled", reason="GPU 0 is in use")


def question(directory, model="llama", objective="samples_per_s"):
    asked = {"vary": {"precision": ["fp32", "bf16"], "seq_len": [64, 128]}, "objective": objective}
    of_model = {"preset": "tiny", "model": {"family": model}}
    return BestQuestion(search_id=directory.name, key="k", **of_model, **asked, clock=CLOCK)


def written(directory, *lines):
    journal = JournalWriter(directory)
    for line in lines:
        journal.write(line)
    journal.close()
    return directory


def best_search(home, *lines, model="llama", objective="samples_per_s"):
    directory = new_search(home, "tiny")
    return written(directory, question(directory, model, objective), CONDUCTED, *lines)


def at_second(second, directory):
    """The search, begun at this second: those of one second have no order."""
    return directory.rename(directory.with_name(f"20260101-00000{second}-tiny-0000"))


def batch_search(home):
    directory = new_search(home, "tiny")
    return written(directory, BatchQuestion(search_id=directory.name, key="k", preset="tiny", clock=CLOCK), CONDUCTED)


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path).create()


def test_a_screen_and_a_key_of_one_kind_do_not_find_a_search_of_the_other(home):
    assert unfinished(home, "k", BATCH_KIND) is None
    batch, best = batch_search(home), best_search(home)
    assert (first_line(batch).kind, first_line(best).kind) == (BATCH_KIND, BEST_KIND)
    assert (newest_search(home), newest_search(home, BEST_KIND)) == (batch, best)
    assert (unfinished(home, "k", BATCH_KIND), unfinished(home, "k", BEST_KIND)) == (batch, best)


def test_a_search_that_was_answered_or_failed_is_not_continued_and_its_reason_is_shown(home):
    at_second(0, best_search(home, BestEnded(state="answered")))
    assert unfinished(home, "k", BEST_KIND) is None
    at_second(1, best_search(home, TRIED))
    failed = at_second(2, best_search(home, BestEnded(state="failed", reason="no module")))
    assert unfinished(home, "k", BEST_KIND) is None
    assert newest_search(home, BEST_KIND) == failed
    cancelled = at_second(3, best_search(home, REFUSED))
    assert unfinished(home, "k", BEST_KIND) == cancelled
