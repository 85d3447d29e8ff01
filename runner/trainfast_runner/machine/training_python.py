"""The Python that trains: ours or the user's own, what it has installed, and what it says a model is."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import msgspec

from trainfast_runner.errors import UserError, nearest
from trainfast_runner.records.home import cache_directory
from trainfast_runner.records.json_lines import write_atomically

WORKER = Path(__file__).parents[1] / "worker"
NEEDED = ("torch", "transformers", "tokenizers")
PATIENCE_S = 120
LOOK_EVERY_S = 0.1
"""How often it is looked whether an answer is still wanted."""
ENDED_EVERY_S = 0.01
"""How often it is looked whether a script has ended."""
PLACE_IN_A_JOB = frozenset(
    (
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK", "CROSS_RANK", "MPI_LOCALRANKID"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "LOCAL_SIZE", "CROSS_SIZE"),
        *("MPI_LOCALNRANKS", "MASTER_ADDR", "MASTER_PORT", "ROLE_NAME"),
    )
)
PLACE_PREFIXES = (
    *("PET_", "TORCHELASTIC_", "PMI_", "PMIX_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_"),
    *("ACCELERATE_", "FSDP_"),
)
"""torchrun reads PET_* as its own options; `accelerate launch` hands its settings down as ACCELERATE_* and FSDP_*."""
MOST_PRINTED = 1 << 26
"""Bytes of a script's output that are read at once; the answer to one request has some hundred kB."""
FAMILIAR = (
    *("llama", "qwen3", "qwen2", "mistral", "mixtral", "gemma3_text", "phi3", "gpt2", "gpt_neox", "opt", "olmo2"),
    *("bert", "roberta", "distilbert", "deberta-v2", "modernbert", "electra", "albert"),
)


@dataclass(frozen=True)
class CudaDevices:
    """The devices that torch sees, in CUDA's order. `uuids` is empty for a torch that does not tell them."""

    names: tuple[str, ...]
    uuids: tuple[str, ...]


@dataclass(frozen=True)
class Inspection:
    """`config` is the model's whole configuration; `parameters` and `attentions` are None where nobody asked."""

    executable: str
    python_version: str
    versions: dict[str, str | None]
    config: dict[str, Any]
    parameters: int | None
    attentions: tuple[str, ...] | None = None
    """Values of `attention` that the model has."""


def inspect(
    python: str | None, model: dict[str, Any], objective: str, count: bool = False, attention: bool = False
) -> Inspection:
    """What the training Python has, and the model's configuration as its transformers understands it.

    Takes about a second the first time and is remembered until something is installed there. With `count` torch is
    imported and the parameters are counted without memory, with `attention` to ask the model's class. Raises UserError.
    """
    executable = find(python)
    request = json.dumps({"model": model, "objective": objective}, sort_keys=True)
    flags = [*(["--count"] if count else []), *(["--attention"] if attention else [])]
    remembered = cache_directory() / "inspected" / f"{stamp(executable, request, ' '.join(flags))}.json"
    answer = _remembered(remembered)
    if answer is None:
        answer = ask(executable, "inspect_model.py", [request, *flags])
        if "error" not in answer:
            _remember(remembered, answer)
    versions = answer.get("versions") or {}
    missing = [name for name in NEEDED if name in versions and versions[name] is None]
    if missing:
        raise missing_packages(executable, missing)
    if answer.get("error"):
        raise model_problem(answer["error"])
    return Inspection(
        executable=executable,
        python_version=answer.get("python", ""),
        versions=versions,
        config=answer.get("config") or {},
        parameters=answer.get("parameters"),
        attentions=tuple(answer["attentions"]) if "attentions" in answer else None,
    )


def visible_to(uuids: Iterable[str]) -> dict[str, str]:
    """The variables with which a process sees these GPUs alone, in this order; none of them for no UUID."""
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(uuids)}


def torch_build(executable: str) -> dict[str, str | None]:
    """`torch`, `torch.version.cuda` and `torch.version.hip` of a Python, as `Inspection.versions` has them.

    Raises UserError for what is not a Python.
    """
    answer: dict[str, str | None] = ask(executable, "torch_build.py", [])
    return answer


def cuda_devices(executable: str, environment: Mapping[str, str] | None = None) -> CudaDevices:
    """The devices torch sees in this environment, by default ours. Imports torch: takes seconds. Raises UserError."""
    found = ask(executable, "inspect_model.py", ["{}", "--devices"], environment=environment)["devices"]
    uuids = [uuid for uuid in found["uuids"] if len(uuid) > len("GPU-")]
    return CudaDevices(tuple(found["names"]), tuple(uuids) if len(uuids) == len(found["names"]) else ())


def model_problem(error: dict[str, Any]) -> UserError:
    """What the worker says of a model that cannot be built, for a person."""
    return UserError(
        str(error.get("message", "the model cannot be configured")).partition("; did you mean")[0],
        key=error.get("key"),
        allowed=_familiar_first(error.get("allowed") or []) if not error.get("nearest") else None,
        nearest=error.get("nearest"),
    )


def _familiar_first(names: list[str]) -> list[str]:
    """The names with the families that most people train in front, so that a list cut short holds them."""
    return [*(name for name in FAMILIAR if name in names), *(name for name in names if name not in FAMILIAR)]


def find(python: str | None) -> str:
    """The absolute path of the training Python; a virtual environment's directory will do. Raises UserError."""
    if python is None:
        return sys.executable
    # Not resolved: a virtual environment is known by the path of its link.
    path = Path(os.path.abspath(os.path.expanduser(python)))
    if path.is_dir():
        path = path / "bin" / "python"
    if not path.exists():
        raise UserError(f"there is no Python at {path}", key="python", nearest=_sibling(path))
    if not os.access(path, os.X_OK):
        raise UserError(f"{path} cannot be executed", key="python")
    return str(path)


def missing_packages(executable: str, missing: Iterable[str]) -> UserError:
    """The refusal of a Python that cannot train, with the command that mends it."""
    names = " ".join(dict.fromkeys(missing))
    return UserError(
        f"{executable} has no {names.replace(' ', ', ')}; install with: {executable} -m pip install {names}",
        key="python",
    )


def own_environment() -> dict[str, str]:
    """The inherited environment without a process's place in somebody else's job.

    A shell inside a torchrun, MPI or accelerate job hands these down; a training of ours would take them for its own.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name not in PLACE_IN_A_JOB and not name.startswith(PLACE_PREFIXES)
    }


def working_directory() -> str:
    """Where the command was typed; empty, which keeps it all the same, where its name cannot be written down."""
    try:
        path = os.getcwd()
        path.encode()
    except FileNotFoundError:
        return "/"  # it has been deleted, and the training's libraries do not load without one
    except UnicodeEncodeError:
        return ""
    return path


class GivenUp(UserError):
    """Whoever asked no longer wants the answer."""


def ask(
    executable: str,
    script: str,
    arguments: list[str],
    given_up: threading.Event | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The JSON object that a script of the worker's answers on its last line. Raises UserError.

    When `given_up` is set meanwhile the script is killed, and GivenUp raised. `environment` replaces ours.
    """
    stdout, stderr = _printed(executable, [executable, str(WORKER / script), *arguments], given_up, environment)
    for line in reversed(stdout.splitlines()):
        try:
            answer = json.loads(line)
        except ValueError:
            continue
        if isinstance(answer, dict):
            return answer
    if arguments and arguments[0] in stderr:
        # What was given to it came back: whatever it is, it took our request for something else.
        raise UserError(f"{executable} does not answer as a Python does", key="python")
    raise UserError(f"{executable} cannot describe the model: {last_line(stderr)}", key="python")


def ask_each(
    executable: str,
    script: str,
    arguments: list[str],
    given_up: threading.Event,
    environment: Mapping[str, str] | None = None,
) -> Generator[dict[str, Any]]:
    """The JSON object that a script answers to each of its arguments, in their order, as soon as it is there.

    `{"imported": true}` may come before the first answer. The script is killed when `given_up` is set, and when the
    iterator is closed. `environment` replaces ours. Raises UserError where an answer fails to come, GivenUp.
    """
    command = [executable, str(WORKER / script), *arguments]
    # Files, not pipes: the script never waits for us, and a look at what is there never waits for the script.
    with TemporaryFile() as printed, TemporaryFile() as complaints:
        process = _start(executable, command, printed, complaints, environment)
        offset = 0

        def new_answers() -> list[dict[str, Any]] | None:
            nonlocal offset
            has_ended = _has_ended(process)
            lines, end, _ = os.pread(printed.fileno(), MOST_PRINTED, offset).rpartition(b"\n")
            offset += len(lines) + len(end)
            if not lines and not has_ended:
                given_up.wait(LOOK_EVERY_S)
            return list(json_objects(lines.splitlines())) if lines or not has_ended else None

        try:
            yield from wait_for_answers(executable, len(arguments), new_answers, given_up, complaints)
        finally:
            _end(process)


def wait_for_answers(
    executable: str,
    owed: int,
    new_answers: Callable[[], list[dict[str, Any]] | None],
    given_up: threading.Event,
    complaints: IO[bytes],
) -> Generator[dict[str, Any]]:
    """Yield the lines of `new_answers` until `owed` answers have come; `{"imported": true}` is not counted.

    `new_answers` waits at most LOOK_EVERY_S, and returns None once no line can come. Raises UserError with the last
    line of `complaints` in that case, UserError after PATIENCE_S without a line, and GivenUp once `given_up` is set.
    """
    deadline = time.monotonic() + PATIENCE_S
    while owed:
        found = new_answers()
        if found is None:
            raise UserError(f"{executable} cannot describe the model: {last_line(_text(complaints))}", key="python")
        for answer in found:
            yield answer
            owed -= "imported" not in answer
            deadline = time.monotonic() + PATIENCE_S
        if owed and given_up.is_set():
            raise no_longer_wanted()
        if owed and time.monotonic() > deadline:
            raise _late(executable)


def json_objects(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Those of the lines that are JSON objects: libraries print as well."""
    for line in lines:
        try:
            answer = json.loads(line)
        except ValueError:
            continue
        if isinstance(answer, dict):
            yield answer


def _start(
    executable: str,
    command: list[str],
    stdout: IO[bytes],
    stderr: IO[bytes],
    environment: Mapping[str, str] | None,
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env={**(own_environment() if environment is None else environment), "TOKENIZERS_PARALLELISM": "false"},
            cwd=working_directory() or None,
            start_new_session=True,
        )
    except OSError as error:
        raise UserError(f"{executable} does not start: {error.strerror}", key="python") from None


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """True if the script has ended. Until it is collected, its pid names nobody else's group."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the script's whole group, with the forks of a script that ended by itself, and collect it."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _printed(
    executable: str, command: list[str], given_up: threading.Event | None, environment: Mapping[str, str] | None
) -> tuple[str, str]:
    """What the command printed on stdout and stderr by its end."""
    deadline = time.monotonic() + PATIENCE_S
    # Files, not pipes: a fork that outlives the script keeps a pipe open.
    with TemporaryFile() as printed, TemporaryFile() as complaints:
        process = _start(executable, command, printed, complaints, environment)
        try:
            while not _has_ended(process):
                if given_up is not None and given_up.is_set():
                    raise no_longer_wanted()
                if time.monotonic() >= deadline:
                    raise _late(executable)
                time.sleep(ENDED_EVERY_S)
        finally:
            # After a Ctrl-C, too, which its session keeps from it.
            _end(process)
        return _text(printed), _text(complaints)


def _text(file: IO[bytes]) -> str:
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode(errors="replace")


def last_line(text: str) -> str:
    """The last line that a process wrote, or words for a process that wrote none."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it exited without reporting an error"


def no_longer_wanted() -> GivenUp:
    return GivenUp("the answer is no longer wanted", key="python")


def _late(executable: str) -> UserError:
    return UserError(f"{executable} did not answer within {PATIENCE_S} s", key="python")


def installed(executable: str) -> list[str]:
    """Changes when a package is installed or removed, or when our own scripts change."""
    stamps = [f"{path}:{path.stat().st_mtime_ns}" for path in sorted(WORKER.rglob("*.py"))]
    prefix = Path(executable).parent.parent
    roots = [prefix, Path(executable).resolve().parent.parent, Path(os.path.expanduser("~/.local"))]
    for root in dict.fromkeys(roots):
        for place in sorted(root.glob("lib/python3*/*-packages")):
            stamps.append(f"{place}:{place.stat().st_mtime_ns}")
    return stamps


def stamp(executable: str, request: str, more: str = "", there: list[str] | None = None) -> str:
    """Changes when what is installed does, or a local model; `request` is JSON with the `model` it is about.

    `there` is `installed(executable)`, where the caller has looked already.
    """
    stamps = [*(installed(executable) if there is None else there)]
    path = json.loads(request)["model"].get("path")
    if path and Path(path).is_dir():
        stamps += [f"{file}:{file.stat().st_mtime_ns}" for file in sorted(Path(path).glob("*.json"))]
    return hashlib.sha256("\n".join([executable, request, more, *stamps]).encode()).hexdigest()[:32]


def _remembered(path: Path) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return None


def _remember(path: Path, answer: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, msgspec.json.encode(answer))
    except OSError:
        return  # without a cache every launch asks again, which costs a second and nothing else


def _sibling(path: Path) -> str | None:
    folder = path.parent
    if not folder.is_dir():
        return None
    near = nearest(path.name, [file.name for file in folder.iterdir()])
    return str(folder / near) if near else None
