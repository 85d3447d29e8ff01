"""The Python that trains, ours or the user's own: its packages, and its answers about a model."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainfast_runner.errors import UserError, nearest
from trainfast_runner.machine.worker_programs import WORKER_FOLDER, ask_worker
from trainfast_runner.records.home import cache_directory
from trainfast_runner.records.json_lines import read_cached, write_cached

NEEDED_PACKAGES = ("torch", "transformers", "tokenizers")
FAMILIAR_FAMILIES = (
    *("llama", "qwen3", "qwen2", "mistral", "mixtral", "gemma3_text", "phi3", "gpt2", "gpt_neox", "opt", "olmo2"),
    *("bert", "roberta", "distilbert", "deberta-v2", "modernbert", "electra", "albert"),
)


@dataclass(frozen=True)
class CudaDevices:
    """The devices that torch sees, in CUDA's order. `uuids` is empty for a torch that lists none."""

    names: tuple[str, ...]
    uuids: tuple[str, ...]


@dataclass(frozen=True)
class Inspection:
    """The answer of `inspect`."""

    executable: str
    python_version: str
    versions: dict[str, str | None]
    config: dict[str, Any]
    """The model's whole configuration."""
    parameters: int | None
    """None unless asked for."""
    attentions: tuple[str, ...] | None = None
    """Values of `attention` that the model has; None unless asked for."""


def inspect(
    python: str | None, model: dict[str, Any], training_objective: str, *, count: bool = False, attention: bool = False
) -> Inspection:
    """Inspect the training Python's packages, and the model's configuration by its transformers.

    Takes about a second the first time and is remembered until something is installed there. With `count` torch is
    imported and the parameters are counted without memory, with `attention` to ask the model's class. Raises UserError.
    """
    executable = find_python(python)
    request = json.dumps({"model": model, "objective": training_objective}, sort_keys=True)
    flags = [*(["--count"] if count else []), *(["--attention"] if attention else [])]
    cache_file = cache_directory() / "inspected" / f"{request_hash(executable, request, ' '.join(flags))}.json"
    answer = read_cached(cache_file, dict[str, Any])
    if answer is None:
        answer = ask_worker(executable, "inspect_model.py", [request, *flags])
        if "error" not in answer:
            write_cached(cache_file, answer)
    versions = answer.get("versions") or {}
    missing = [name for name in NEEDED_PACKAGES if name in versions and versions[name] is None]
    if missing:
        raise _missing_packages_error(executable, missing)
    if answer.get("error"):
        raise model_error(answer["error"])
    return Inspection(
        executable=executable,
        python_version=answer.get("python", ""),
        versions=versions,
        config=answer.get("config") or {},
        parameters=answer.get("parameters"),
        attentions=tuple(answer["attentions"]) if "attentions" in answer else None,
    )


def torch_build(executable: str) -> dict[str, str | None]:
    """`torch`, `torch.version.cuda` and `torch.version.hip` of a Python, as `Inspection.versions` has them.

    Raises UserError for what is not a Python.
    """
    answer: dict[str, str | None] = ask_worker(executable, "torch_build.py", [], task="report its torch")
    return answer


def cuda_devices(executable: str, environment: Mapping[str, str] | None = None) -> CudaDevices:
    """The devices torch sees in this environment, by default ours. Imports torch: takes seconds. Raises UserError."""
    answer = ask_worker(executable, "inspect_model.py", ["{}", "--devices"], environment, task="list its GPUs")
    names, uuids = answer["devices"]["names"], [uuid for uuid in answer["devices"]["uuids"] if len(uuid) > len("GPU-")]
    return CudaDevices(tuple(names), tuple(uuids) if len(uuids) == len(names) else ())


def model_error(error: dict[str, Any]) -> UserError:
    """The worker's error about a model that cannot be built, as a UserError."""
    return UserError(
        str(error.get("message", "the model cannot be configured")).partition("; did you mean")[0],
        key=error.get("key"),
        allowed=_familiar_first(error.get("allowed") or []) if not error.get("nearest") else None,
        nearest=error.get("nearest"),
    )


def _familiar_first(names: list[str]) -> list[str]:
    """The names with the families that most people train in front, so that a list cut short holds them."""
    return [
        *(name for name in FAMILIAR_FAMILIES if name in names),
        *(name for name in names if name not in FAMILIAR_FAMILIES),
    ]


def find_python(python: str | None) -> str:
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
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError(f"{os.fsencode(path)!r} is not UTF-8 and cannot be recorded", key="python") from None
    return str(path)


def _missing_packages_error(executable: str, missing: Iterable[str]) -> UserError:
    """The refusal of a Python that lacks packages, with the command that installs them."""
    names = " ".join(dict.fromkeys(missing))
    return UserError(
        f"{executable} has no {names.replace(' ', ', ')}; install with: {executable} -m pip install {names}",
        key="python",
    )


def install_stamps(executable: str) -> list[str]:
    """Times of change, which differ after a package is installed or removed, or our own scripts change."""
    stamps = [f"{path}:{path.stat().st_mtime_ns}" for path in sorted(WORKER_FOLDER.rglob("*.py"))]
    prefix = Path(executable).parent.parent
    roots = [prefix, Path(executable).resolve().parent.parent, Path(os.path.expanduser("~/.local"))]
    for root in dict.fromkeys(roots):
        for folder in sorted(root.glob("lib/python3*/*-packages")):
            stamps.append(f"{folder}:{folder.stat().st_mtime_ns}")
    return stamps


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


def _sibling(path: Path) -> str | None:
    folder = path.parent
    if not folder.is_dir():
        return None
    near = nearest(path.name, [file.name for file in folder.iterdir()])
    return str(folder / near) if near else None
