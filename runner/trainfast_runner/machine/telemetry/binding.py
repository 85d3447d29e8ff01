"""The module `pynvml` of nvidia-ml-py, of any version: a function that it lacks loses one reading."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

from trainfast_runner.machine.telemetry import failures
from trainfast_runner.machine.telemetry.failures import PYNVML_MODULE, REINSTALL, NvmlError, NvmlFailure
from trainfast_runner.machine.telemetry.plausible import refusal
from trainfast_runner.records.tick import MIG_PREFIX

T = TypeVar("T")


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


def _text_of(error: BaseException) -> str:
    """The error's text in one line; the text of an NVML error is the driver's, which may be unreadable too."""
    try:
        return " ".join(str(error).split())
    except Exception as unreadable:
        return type(unreadable).__name__


def load() -> ModuleType | NvmlFailure:
    """Import pynvml, and return it or the failure. Raises nothing, whatever the import raises."""
    try:
        module = importlib.import_module("pynvml")
        if not issubclass(module.NVMLError, Exception):
            raise TypeError("NVMLError is no exception")
    except (Exception, SystemExit) as error:
        return NvmlFailure(f"{PYNVML_MODULE} cannot be used ({type(error).__name__}: {_text_of(error)})", REINSTALL)
    return Guarded(module)


def ask_once(read: Callable[[ModuleType], T]) -> T | NvmlFailure:
    """Open NVML, return the result of `read`, and close NVML; if it does not answer, return its failure."""
    nv = load()
    if isinstance(nv, NvmlFailure):
        return nv
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
