"""A batch search that has begun: its directory, with the first lines of its journal."""

import os

from on_disk import batch_question
from trainfast_runner.machine.processes import boot_id
from trainfast_runner.search.journal import Conducted, JournalWriter
from trainfast_runner.search.searches import new_search

SECOND = 1_000_000_000


def asked(directory, key="k"):
    """The question of the search in this directory."""
    return batch_question(directory.name, key)


def conducted(t_ns=1):
    """The line of a conductor that began at this time, whose process is not this one."""
    return Conducted(t_ns=t_ns, pid=os.getpid(), start_ticks=1, boot_id=boot_id())


def search(home, key="k"):
    """The directory of a new search, and the writer of its journal."""
    directory = new_search(home, "tiny-llama")
    journal = JournalWriter(directory)
    journal.write(asked(directory, key))
    return directory, journal
