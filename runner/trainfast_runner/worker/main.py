"""The life of one rank: hold the run's lock, record the process, train, and record the end."""

import fcntl
import gc
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from .invalid import InvalidInput
from .memory.allocator import Allocator
from .model.inspection import hide_packages
from .records.record_file import WorkerLog
from .shared.host import ALIVE_LOCK_FILE
from .shared.process import die_with_parent, exit_now, start_ticks
from .shared.words import NODE_VARIABLE
from .spec import read_spec

EXIT_FAILED = 1
"""Exit code after an error of the training."""
EXIT_INVALID = 2
"""Exit code after a mistake in the input."""


def main(run_dir: str) -> None:
    """Run one rank and end the process: exit code 0, 1 for an error, 2 for a mistake in the input."""
    folder = Path(run_dir).resolve()
    rank = int(os.environ.get("RANK", "0"))
    node = int(os.environ.get(NODE_VARIABLE, "0"))
    if NODE_VARIABLE in os.environ:
        # If torchrun's agent is killed, its ranks must not train on alone.
        die_with_parent()
    # Shared, for the life of this process: the descriptor is never closed.
    fcntl.flock(os.open(folder / ALIVE_LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), fcntl.LOCK_SH)
    log = WorkerLog(folder, rank)
    log.write(
        "started",
        rank=rank,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        node=node,
        pid=os.getpid(),
        start_ticks=start_ticks(),
    )
    code = 0
    try:
        spec = read_spec(folder, rank)
        allocator = Allocator()
        if spec.device == "cpu":
            # Before torch is imported: large blocks freed on the heap would take tensors later.
            allocator.set_strict()
        log.enter("import", "torch and transformers")
        # Collections are a fifth of the imports' time; `Training` enables them again.
        gc.disable()
        # transformers imports it for weights of its formats, which no model here has: 140 modules and three warnings.
        hide_packages(("torchao",))
        # Only here, because it imports torch.
        from .training import Training

        Training(folder, spec, log, allocator).run()
    except InvalidInput as error:
        log.write("invalid", **error.as_fields())
        with suppress(OSError):  # the output is on the run's disk, which may be full
            print(f"invalid: {error}", file=sys.stderr)
        code = EXIT_INVALID
    except BaseException as error:
        log.exception(error)
        with suppress(OSError):
            traceback.print_exc()
        code = EXIT_FAILED
    log.settle()
    exit_now(code)
