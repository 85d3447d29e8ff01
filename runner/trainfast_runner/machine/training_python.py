"""The Python that trains, ours or the user's own: its packages, and its answers about a model."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from trainfast_runner.errors import UserError, nearest
from trainfast_runner.machine.resource_limits import inherited_limits, limit_words
from trainfast_runner.records.capped_file import last_line
from trainfast_runner.records.home import cache_directory

NEEDED_PACKAGES = ("torch", "transformers", "tokenizers")


def model_error(error: dict[str, Any]) -> UserError:
    """The worker's error about a model that cannot be built, as a UserError."""
    message = str(error.get("message", "the model cannot be configured")).partition("; did you mean")[0]
    near = error.get("nearest")
    return UserError(message, key=error.get("key"), allowed=None if near else error.get("allowed") or [], nearest=near)


def find_python(python: str | None) -> str:
    """The absolute path of the training Python; a virtual environment's directory will do. Raises UserError."""
    if python is None:
        return sys.executable
    # Not resolved: a virtual environment is known by the path of its link.
    path = Path(os.path.abspath(os.path.expanduser(python)))
    if path.is_dir():
        path = path / "bin" / "python"
    if not path.exists():
        near = nearest(path.name, [file.name for file in path.parent.iterdir()]) if path.parent.is_dir() else None
        raise UserError(
            f"there is no Python at {path}", key="python", nearest=str(path.parent / near) if near else None
        )
    if not os.access(path, os.X_OK):
        raise UserError(f"{path} cannot be executed", key="python")
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError(f"{os.fsencode(path)!r} is not UTF-8 and cannot be recorded", key="python") from None
    return str(path)


def install_stamps(executable: str) -> list[str]:
    """Times of change, which differ after a package is installed or removed, or our own scripts change."""
    path = Path(executable)
    roots = dict.fromkeys((path.parent.parent, path.resolve().parent.parent, Path(os.path.expanduser("~/.local"))))
    folders = [folder for root in roots for folder in sorted(root.glob("lib/python3*/*-packages"))]
    return [f"{path}:{path.stat().st_mtime_ns}" for path in (*sorted(WORKER_FOLDER.rglob("*.py")), *folders)]


def request_hash(executable: str, request: str, form: str, installed: list[str] | None = None) -> str:
    """A hash that changes with the installed packages or a local model; `request` is JSON with its `model`.

    `form` names the form of the answer. `installed` is `install_stamps(executable)`, where the caller has looked
    already.
    """
    stamps = install_stamps(executable) if installed is None else list(installed)
    path = json.loads(request)["model"].get("path")
    if path and Path(path).is_dir():
        stamps += [f"{file}:{file.stat().st_mtime_ns}" for file in sorted(Path(path).glob("*.json"))]
    return hashlib.sha256("\n".join([executable, request, form, *stamps]).encode()).hexdigest()[:32]


WORKER_FOLDER = Path(__file__).parents[1] / "worker"
PROGRAMS = WORKER_FOLDER / "programs"
ANSWER_TIMEOUT_S = 120
ENDED_EVERY_S = 0.01
"""Seconds between two polls for a program's end."""
JOB_VARIABLES = re.compile(
    r"((LOCAL|GROUP|ROLE|NODE|CROSS)_)?RANK|((LOCAL|GROUP|ROLE)_)?WORLD_SIZE|(LOCAL|CROSS)_SIZE|MPI_LOCAL(RANKID|NRANKS)"
    r"|MASTER_(ADDR|PORT)|ROLE_NAME|(PET|TORCHELASTIC|PMIX?|(OMPI|MV2)_COMM_WORLD|ACCELERATE|FSDP)_.*"
)
"""A launcher's variables: torchrun's options are PET_*, accelerate's settings ACCELERATE_* and FSDP_*."""


def own_environment() -> dict[str, str]:
    """The inherited environment without the variables that tell a process of another job its rank and settings.

    A shell inside a torchrun, MPI or accelerate job passes them on; a training of ours would read them as its own.
    """
    return {name: value for name, value in os.environ.items() if not JOB_VARIABLES.fullmatch(name)}


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
    deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
    # Files, not pipes: a fork that outlives the program keeps a pipe open.
    with open_temporary_file() as printed, open_temporary_file() as errors:
        command = [executable, path, *arguments]
        process = start_worker_program(executable, command, errors, environment, printed=printed)
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
        stdout, stderr = whole_text(printed), whole_text(errors)
    if answers := list(json_objects(stdout.splitlines())):
        return answers[-1]
    raise no_answer_error(executable, path, stderr, task, stdout)


def no_answer_error(executable: str, program: str, stderr: str, task: str, stdout: str = "") -> UserError:
    """The error of a program of the training Python that wrote this and no answer."""
    # `ls` prints the path, and a shell names it before its error; Python has a line number after it.
    if re.search(rf"{re.escape(program)}(: |\n|$)", stdout + stderr):
        return UserError(f"{executable} is not a Python interpreter", key="python")
    reason = last_error_line(stderr)
    limit = limit_words(inherited_limits(), reason, stderr)
    return UserError(f"{executable} cannot {task}: {reason}{limit}", key="python")


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
    errors: IO[bytes],
    environment: Mapping[str, str] | None,
    *pass_fds: int,
    stdin: int = subprocess.DEVNULL,
    printed: IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, which writes its errors, and without `printed` all, to a file.

    `environment` replaces ours. Raises UserError if it does not start.
    """
    try:
        return subprocess.Popen(
            command,
            stdin=stdin,
            stdout=printed or errors,
            stderr=errors,
            bufsize=0,
            pass_fds=pass_fds,
            env={**(own_environment() if environment is None else environment), "TOKENIZERS_PARALLELISM": "false"},
            cwd=working_directory() or None,
            start_new_session=True,
        )
    except OSError as error:
        reason = str(error.strerror)
        limit = limit_words(inherited_limits(), reason)
        raise UserError(f"{executable} does not start: {reason}{limit}", key="python") from None


def open_temporary_file() -> IO[bytes]:
    """An empty file that is gone once it is closed. Raises UserError where the temporary folder takes none."""
    try:
        return TemporaryFile()
    except OSError as error:
        advice = "freeing some space, or TMPDIR set to another folder"
        raise UserError(f"a temporary file cannot be made: {error.strerror}", key="TMPDIR", advice=advice) from None


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


USES_LIBAIO = b"#include <libaio.h>\nint main() { return io_submit(0, 0, 0); }\n"

COMPILED_WITHIN_S = 30.0
"""Chosen, not measured: a compiler that takes longer for two lines counts as failed."""


def extensions_directory(python: str, versions: Mapping[str, str | None]) -> Path:
    """One directory for each training Python and its versions: elsewhere torch would build the same name again.

    It lies below TORCH_EXTENSIONS_DIR if that is set, but is never that itself, where a user's own script may build.
    """
    names = [f"{name}{versions.get(name)}" for name in ("torch", "deepspeed")]
    configured = os.environ.get("TORCH_EXTENSIONS_DIR")
    base = Path(configured) / "trainfast" if configured else cache_directory() / "extensions"
    return base / "-".join([*names, hashlib.sha256(python.encode()).hexdigest()[:8]])


def search_path(python: str) -> str:
    """PATH as a launch sets it: the training Python's own folder, where pip puts ninja, comes first."""
    return os.pathsep.join([os.path.dirname(python), os.environ.get("PATH", os.defpath)])


def compiler(python: str) -> str | None:
    """The C++ compiler torch will call, or None; torch calls no other in place of an empty CXX."""
    command = os.environ.get("CXX", "c++").split()
    return shutil.which(command[0], path=search_path(python)) if command else None


def missing_tool(python: str) -> tuple[str, str] | None:
    """The first missing build tool, and the command that installs it; None if all are there."""
    if compiler(python) is None:
        return "a C++ compiler", "apt-get install g++"
    if shutil.which("ninja", path=search_path(python)) is None:
        return "ninja", f"{python} -m pip install ninja"
    return None


def has_libaio(python: str) -> bool:
    """True if a program with libaio's header compiles and links, as DeepSpeed's async_io must."""
    command = [compiler(python) or "c++", "-x", "c++", "-", "-o", os.devnull, "-laio"]
    try:
        subprocess.run(command, input=USES_LIBAIO, capture_output=True, timeout=COMPILED_WITHIN_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return False
    return True
