"""The life of one rank: hold the lock, say who we are, train, and write down how it ended."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from .allocator import Allocator
from .invalid import InvalidInput
from .leaving import leave
from .records import Journal, hold_alive_lock, start_ticks
from .spec import read_spec

EXIT_FAILED = 1
EXIT_INVALID = 2


def main(run_dir: str) -> None:
    """Run one rank to its end, and the process with it: exit code 0, 1 for an error, 2 for a mistake in the input."""
    folder = Path(run_dir).resolve()
    rank = int(os.environ.get("RANK", "0"))
    hold_alive_lock(folder)
    journal = Journal(folder, rank)
    journal.write(
        "started",
        rank=rank,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        pid=os.getpid(),
        start_ticks=start_ticks(),
    )
    try:
        spec = read_spec(folder, rank)
        allocator = Allocator()
        if spec.device == "cpu":
            # Before torch is imported: large blocks freed on the heap would take tensors later.
            allocator.strict()
        journal.enter("import", "torch and transformers")
        from .session import train_once

        train_once(folder, spec, journal, allocator)
    except InvalidInput as error:
        journal.write("invalid", **error.as_fields())
        print(f"invalid: {error}", file=sys.stderr)
        journal.settle()
        leave(EXIT_INVALID)
    except BaseException as error:
        journal.exception(error)
        traceback.print_exc()
        journal.settle()
        leave(EXIT_FAILED)
    journal.settle()
    leave(0)
