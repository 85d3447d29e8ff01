"""The module `pynvml`: nvidia-ml-py's, or something else of that name which may lack anything."""

from __future__ import annotations

import contextlib
import functools
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
from trainfast_runner.machine.telemetry.failures import PYNVML_MODULE, NvmlError, NvmlFailure
from trainfast_runner.machine.telemetry.plausible import refusal
from trainfast_runner.records.tick import MIG_PREFIX

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


class Guarded(ModuleType):
    """A `pynvml` whose calls raise `NvmlError` alone, so that an answer that cannot be read loses only its reading."""

    NVMLError = NvmlError

    def __init__(self, module: ModuleType) -> None:
        super().__init__(module.__name__)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name, None)
        if value is None:
            raise NvmlError(failures.BINDING_LACKS)
        return functools.partial(self.call, value) if callable(value) and not isinstance(value, type) else value

    def call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """The function's result, guarded too if it is a function. Raises NvmlError, whatever the function raises."""
        try:
            result = function(*arguments, **options)
        except NvmlError:
            raise
        except Exception as error:
            text = _text_of(error)
            if isinstance(error, self._module.NVMLError):
                code = getattr(error, "value", None)
                raise NvmlError(code if isinstance(code, int) else failures.UNKNOWN, text) from error
            reason = f"the driver's answer cannot be read ({type(error).__name__}: {text})"
            raise NvmlError(failures.UNREADABLE, reason) from error
        return functools.partial(self.call, result) if callable(result) else result


def _text_of(error: Exception) -> str:
    """The error's text in one line; the text of an NVML error is the driver's, which may be unreadable too."""
    try:
        return " ".join(str(error).split())
    except Exception as unreadable:
        return type(unreadable).__name__


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
            with contextlib.suppress(NvmlError):
                nv.nvmlShutdown()
    except NvmlError as error:
        return failures.library_failure(error.value, str(error))


def answer_or_none(nv: ModuleType, ask: Callable[[], Any]) -> Any:
    """The answer, or None when this GPU, driver or binding gives none."""
    try:
        return nv.call(ask)
    except NvmlError:
        return None


def text_or_reason(nv: ModuleType, ask: Callable[[], str]) -> tuple[str | None, str | None]:
    """The text, or None and the reason. Raises NvmlError when the GPU or the library is gone."""
    try:
        return nv.call(ask), None
    except NvmlError as error:
        if failures.is_fatal(error.value):
            raise
        return None, failures.reading_failure(error.value, str(error))


def as_text(value: str | bytes) -> str:
    """A string of NVML; bindings before 11.515 return bytes. Raises ValueError for one that is no text."""
    text = value.decode() if isinstance(value, bytes) else value
    if not text.strip() or not text.isprintable():
        raise ValueError(f"{text!r} is no text")
    return text


def uuid_of(nv: ModuleType, handle: Any) -> str:
    """The UUID of a GPU or MIG instance. Raises ValueError for one that CUDA would not take."""
    uuid = as_text(nv.nvmlDeviceGetUUID(handle))
    if not uuid.startswith(("GPU-", MIG_PREFIX)):
        raise ValueError(f"{uuid!r} is no UUID")
    return uuid


def possible_count(nv: ModuleType, name: str, ask: Callable[[], int]) -> int:
    """A number of GPUs or MIG slots. Raises NvmlError also for an impossible one, which nobody may count through."""
    count: int = nv.call(ask)
    if (reason := refusal(name, count)) is not None:
        raise NvmlError(failures.UNREADABLE, reason)
    return count


def gpu_count(nv: ModuleType) -> int:
    """The number of GPUs that the driver lists. Raises NvmlError."""
    return possible_count(nv, "gpu_count", nv.nvmlDeviceGetCount)


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
        return Binding(Guarded(module), warning=foreign_module_failure(module))
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
