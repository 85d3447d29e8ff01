"""The module `pynvml`: nvidia-ml-py's, or something else of that name which may lack anything."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import site
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeVar

from trainfast_runner.machine.telemetry import failures
from trainfast_runner.machine.telemetry.failures import PYNVML_MODULE, NvmlFailure

T = TypeVar("T")

NO_BINDING: Final = NvmlFailure(f"{PYNVML_MODULE} cannot be imported", "pip install nvidia-ml-py")
REINSTALL_ADVICE: Final = "pip uninstall pynvml nvidia-ml-py3, then pip install --force-reinstall nvidia-ml-py"
SHORT_WARNING: Final = "pynvml is not nvidia-ml-py's: trainfast-tui doctor has the cure"
"""Short warning for a screen when the module is foreign and shows GPUs all the same."""
NEEDED_NAMES: Final = (
    *("NVMLError", "nvmlInit", "nvmlShutdown", "nvmlSystemGetDriverVersion", "nvmlDeviceGetCount"),
    *("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetName", "nvmlDeviceGetUUID"),
)
"""Names without which no GPU is seen; any other may be missing, reading by reading."""


@dataclass(frozen=True)
class Binding:
    """The result of `import pynvml`."""

    module: ModuleType | None = None
    """None when no GPU can be read through it."""
    failure: NvmlFailure | None = None
    """The reason that no GPU can be read through it."""
    warning: NvmlFailure | None = None
    """The failure of a module that is not nvidia-ml-py's; None for nvidia-ml-py's own."""


def load() -> Binding:
    """Import pynvml. Raises nothing, whatever a foreign module of that name raises."""
    try:
        module = importlib.import_module("pynvml")
    except (Exception, SystemExit) as error:
        if (module_file := _pynvml_path()) is None:
            return Binding(failure=NO_BINDING)
        return Binding(
            failure=NvmlFailure(
                f"{PYNVML_MODULE} cannot be imported ({type(error).__name__})", replacement_advice(module_file)
            )
        )
    return checked_binding(module)


def ask_once(read: Callable[[ModuleType], T]) -> T | NvmlFailure:
    """Open NVML, return the result of `read`, and close NVML; if it does not answer, return its failure."""
    loaded = load()
    nv = loaded.module
    if nv is None:
        return loaded.failure or NO_BINDING
    try:
        nv.nvmlInit()
        try:
            return read(nv)
        finally:
            with contextlib.suppress(nv.NVMLError):
                nv.nvmlShutdown()
    except nv.NVMLError as error:
        return failures.library_failure(getattr(error, "value", failures.UNKNOWN), str(error))


def answer_or_none(nv: ModuleType, ask: Callable[[], Any]) -> Any:
    """The answer, or None when this GPU, driver or binding gives none."""
    try:
        return ask()
    except (nv.NVMLError, AttributeError, TypeError):
        return None


def as_text(value: str | bytes) -> str:
    """A string of NVML; bindings before 11.515 return bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def replacement_advice(path: str) -> str:
    """The way to replace the module in this file by nvidia-ml-py's; pip removes only its own installations."""
    file = Path(path)
    if any(file.is_relative_to(folder) for folder in (*site.getsitepackages(), site.getusersitepackages())):
        return REINSTALL_ADVICE
    file = file.parent if file.name == "__init__.py" else file
    return f"rename {file}, or take its folder out of PYTHONPATH; if there is then no pynvml, pip install nvidia-ml-py"


def _pynvml_path() -> str | None:
    """The file that `import pynvml` runs; None when there is none."""
    try:
        spec = importlib.util.find_spec("pynvml")
    except (ImportError, ValueError):
        return None
    return spec.origin if spec is not None else None


def checked_binding(module: ModuleType) -> Binding:
    """The binding of an imported module: with a failure if it is of no use, a warning if it is not nvidia-ml-py's."""
    error = getattr(module, "NVMLError", None)
    is_error = isinstance(error, type) and issubclass(error, Exception)
    if is_error and all(hasattr(module, name) for name in NEEDED_NAMES):
        return Binding(module, warning=foreign_module_failure(module))
    module_file = getattr(module, "__file__", None) or "memory"
    reason = f"{PYNVML_MODULE} in {module_file} is not nvidia-ml-py's, and no GPU can be seen through it"
    return Binding(failure=NvmlFailure(reason, replacement_advice(module_file)))


def foreign_module_failure(module: ModuleType) -> NvmlFailure | None:
    """The failure of an imported `pynvml` that is not nvidia-ml-py's; None for one that is.

    The distributions `nvidia-ml-py3` and `pynvml` before 12 install a module of the same name, made for the
    drivers of their day.
    """
    module_file = getattr(module, "__file__", None)
    reason = f"{PYNVML_MODULE} in {module_file or 'memory'} is not nvidia-ml-py's and lacks some readings"
    failure = NvmlFailure(reason, replacement_advice(module_file or "memory"))
    try:
        official = importlib.metadata.distribution("nvidia-ml-py")
    except importlib.metadata.PackageNotFoundError:
        return failure
    if module_file is None or not hasattr(module, "nvmlMemory_v2"):
        return failure
    expected = Path(str(official.locate_file("pynvml.py")))
    return None if expected.exists() and expected.samefile(module_file) else failure
