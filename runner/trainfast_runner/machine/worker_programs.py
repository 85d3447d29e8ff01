"""Programs of the worker, run by a training Python: each prints its answer as a JSON object on a line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from trainfast_runner.errors import UserError
from trainfast_runner.machine.resource_limits import inherited_limits, limit_words
from trainfast_runner.records.output_log import last_line

WORKER_FOLDER = Path(__file__).parents[1] / "worker"
PROGRAMS = WORKER_FOLDER / "programs"
ANSWER_TIMEOUT_S = 120
ENDED_EVERY_S = 0.01
"""Seconds between two polls for a program's end."""
JOB_VARIABLES = frozenset(
    (
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK", "CROSS_RANK", "MPI_LOCALRANKID"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "LOCAL_SIZE", "CROSS_SIZE"),
        *("MPI_LOCALNRANKS", "MASTER_ADDR", "MASTER_PORT", "ROLE_NAME"),
    )
)
JOB_PREFIXES = (
    *("PET_", "TORCHELASTIC_", "PMI_", "PMIX_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_"),
    *("ACCELERATE_", "FSDP_"),
)
"""Beginnings of a launcher's variables: torchrun's options are PET_*, accelerate's settings ACCELERATE_* and FSDP_*."""


def own_environment() -> dict[str, str]:
    """The inherited environment without the variables that tell a process of another job its rank and settings.

    A shell inside a torchrun, MPI or accelerate job passes them on; a training of ours would read them as its own.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name not in JOB_VARIABLES and not name.startswith(JOB_PREFIXES)
    }


def working_directory() -> str:
    """The working directory; `/` if it was deleted, empty if its name is not UTF-8."""
    try:
        path = os.getcwd()
        path.encode()
    except FileNotFoundError:
        return "/"  # the training's libraries do not load without one
    except UnicodeEncodeError:
        return ""  # an empty cwd leaves a child where it is
    return path


class ProgramCancelled(Exception):
    """Raised by a trace whose answer is no longer wanted."""


def ask_worker(
    executable: str,
    program: str,
    arguments: list[str],
    environment: Mapping[str, str] | None = None,
    *,
    task: str = "describe the model",
) -> dict[str, Any]:
    """The last JSON object that a program prints on a line; `environment` replaces ours.

    Raises UserError, which says that the Python cannot do the `task`.
    """
    path = str(PROGRAMS / program)
    stdout, stderr = _output_of(executable, [executable, path, *arguments], environment)
    if answers := list(json_objects(stdout.splitlines())):
        return answers[-1]
    # `ls` prints the path, and a shell names it before its error; Python has a line number after it.
    if path in stdout or f"{path}: " in stderr:
        raise UserError(f"{executable} is not a Python interpreter", key="python")
    reason = last_error_line(stderr)
    raise UserError(
        f"{executable} cannot {task}: {reason}{limit_words(inherited_limits(), reason, stderr)}", key="python"
    )


def json_objects(lines: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects among the lines, which libraries print to as well."""
    for line in lines:
        try:
            answer = json.loads(line)
        except ValueError:
            continue
        if isinstance(answer, dict):
            yield answer


def start_worker_program(
    executable: str,
    command: list[str],
    stderr: IO[bytes],
    environment: Mapping[str, str] | None = None,
    *,
    stdin: int = subprocess.DEVNULL,
    stdout: IO[bytes] | int = subprocess.PIPE,
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own; `environment` replaces ours. Raises UserError if it does not start."""
    try:
        return subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            bufsize=0,
            env={**(own_environment() if environment is None else environment), "TOKENIZERS_PARALLELISM": "false"},
            cwd=working_directory() or None,
            start_new_session=True,
        )
    except OSError as error:
        reason = str(error.strerror)
        limit = limit_words(inherited_limits(), reason)
        raise UserError(f"{executable} does not start: {reason}{limit}", key="python") from None


def _output_of(executable: str, command: list[str], environment: Mapping[str, str] | None) -> tuple[str, str]:
    """The command's stdout and stderr, once it has ended."""
    deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
    # Files, not pipes: a fork that outlives the program keeps a pipe open.
    with open_temporary_file() as printed, open_temporary_file() as errors:
        process = start_worker_program(executable, command, errors, environment, stdout=printed)
        try:
            # Do not collect the process yet: until then no other process group gets its pid.
            while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                if time.monotonic() >= deadline_s:
                    raise timeout_error(executable)
                time.sleep(ENDED_EVERY_S)
        finally:
            # The whole group: forks outlive a program, and a Ctrl-C does not reach its session.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return whole_text(printed), whole_text(errors)


def open_temporary_file() -> IO[bytes]:
    """An empty file that is gone once it is closed. Raises UserError where the temporary folder takes none."""
    try:
        return TemporaryFile()
    except OSError as error:
        raise UserError(
            f"a temporary file cannot be made: {error.strerror}",
            key="TMPDIR",
            advice="freeing some space, or TMPDIR set to another folder",
        ) from None


def whole_text(file: IO[bytes]) -> str:
    """The whole content of an open file; its position stays."""
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode(errors="replace")


def last_error_line(text: str) -> str:
    """The last line of a process's errors, or a sentence when it wrote none."""
    return last_line(text.splitlines()) or "it exited without reporting an error"


def timeout_error(executable: str) -> UserError:
    """The error of a program that did not answer in time."""
    return UserError(f"{executable} did not answer within {ANSWER_TIMEOUT_S} s", key="python")
