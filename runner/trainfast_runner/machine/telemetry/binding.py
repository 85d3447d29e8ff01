"""NVML and its binding `pynvml`: imported, opened and opened again, and its failures in plain words with the cure.

The codes are `nvmlReturn_t` of nvml.h. A binding may lack functions; each missing function loses one reading.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeVar

import msgspec

from trainfast_runner.machine.telemetry.plausible import refusal
from trainfast_runner.records.tick import MIG_PREFIX

UNINITIALIZED: Final = 1
INVALID_ARGUMENT: Final = 2
NOT_SUPPORTED: Final = 3
NO_PERMISSION: Final = 4
INSUFFICIENT_SIZE: Final = 7
DRIVER_NOT_LOADED: Final = 9
TIMEOUT: Final = 10
IRQ_ISSUE: Final = 11
LIBRARY_NOT_FOUND: Final = 12
FUNCTION_NOT_FOUND: Final = 13
GPU_IS_LOST: Final = 15
RESET_REQUIRED: Final = 16
LIB_RM_VERSION_MISMATCH: Final = 18
IN_USE: Final = 19
MEMORY: Final = 20
NO_DATA: Final = 21
NOT_READY: Final = 27
UNKNOWN: Final = 999
UNREADABLE: Final = -1
"""Ours: the call raised something else than an error of NVML, such as a decoding error."""
BINDING_LACKS: Final = -2
"""Ours: the binding has no such function."""
TRANSIENT: Final = frozenset(
    {INSUFFICIENT_SIZE, TIMEOUT, IRQ_ISSUE, IN_USE, MEMORY, NO_DATA, NOT_READY, UNKNOWN, UNREADABLE}
)
"""Failures that may pass: ask again next tick."""


class NvmlError(Exception):
    """A call of NVML that failed: `value` is its code, or one of ours."""

    def __init__(self, value: int, text: str = "no value") -> None:
        super().__init__(text)
        self.value = value


class NvmlFailure(msgspec.Struct, frozen=True):
    """A reason that NVML or a GPU does not answer, and its cure; None without one."""

    reason: str
    cure: str | None = None

    @property
    def sentence(self) -> str:
        """Both in one text, as records have it; a cure that begins with a capital letter is a sentence of its own."""
        if self.cure is None:
            return self.reason
        return f"{self.reason}{'. ' if self.cure[0].isupper() else ': '}{self.cure}"


LIBRARY_FAILURES: Final = {
    LIBRARY_NOT_FOUND: NvmlFailure(
        "no NVIDIA driver here: libnvidia-ml.so.1 was not found",
        "Install the driver; in a container, start it with --gpus all; if the file is elsewhere, put its folder in"
        " LD_LIBRARY_PATH",
    ),
    DRIVER_NOT_LOADED: NvmlFailure(
        "the NVIDIA kernel module is not loaded",
        "run `sudo modprobe nvidia`, or reboot after a driver installation",
    ),
    LIB_RM_VERSION_MISMATCH: NvmlFailure(
        "the driver was updated under the running system", "reboot, or reload the nvidia kernel modules"
    ),
    UNINITIALIZED: NvmlFailure("the connection to the NVIDIA driver was lost: trying again"),
}
"""Failures of the whole library: no GPU answers until it is initialized again."""

UNLOADABLE: Final = "libnvidia-ml.so.1 was found and cannot be loaded"
PYNVML_MODULE: Final = "the pynvml module"
"""Begins each failure of the binding."""
REINSTALL: Final = "pip install --force-reinstall nvidia-ml-py"
NO_DEVICE_NODES: Final = NvmlFailure(
    "the NVIDIA driver is loaded, but /dev/nvidiactl is not there",
    "in a container, start it with --gpus all; else run `sudo nvidia-modprobe -c 0 -u`",
)
NO_ACCESS: Final = NvmlFailure(
    "no permission to talk to the NVIDIA driver",
    "give this user the /dev/nvidia* files (often the group video or render); in a container, start it with --gpus all",
)

HAS_NOT_ANSWERED: Final = "has not answered for"
"""In each sentence about a call that has not returned: recorded runs are read by it."""
SLOW_S: Final = 15.0
"""Seconds after which a call is treated as hanging."""

DEVICE_FAILURES: Final = {
    GPU_IS_LOST: NvmlFailure(
        "GPU is lost: it no longer answers on its bus",
        "Look for Xid 79 in `dmesg`, check power cables and temperature; a reboot usually brings it back",
    ),
    RESET_REQUIRED: NvmlFailure(
        "GPU needs a reset", "end its processes and run `sudo nvidia-smi --gpu-reset`, or reboot"
    ),
}
"""Failures of one GPU: the others keep reporting."""

BINDING_TOO_OLD: Final = "the installed pynvml module is too old for this reading: pip install --upgrade nvidia-ml-py"
_READING_FAILURES: Final = {
    NOT_SUPPORTED: "not supported by this GPU and driver",
    NO_PERMISSION: "the driver gives this to administrators only",
    FUNCTION_NOT_FOUND: "the installed driver is too old for this reading",
    INSUFFICIENT_SIZE: "the driver lists more processes than are looked at (256)",
    BINDING_LACKS: BINDING_TOO_OLD,
}

UNIFIED_MEMORY: Final = (
    "not supported by this GPU and driver: a GPU that shares the host's memory (GB10, Jetson) has none of its own; "
    "the host's memory is its limit"
)
UNDER_MIG: Final = "not given while MIG is on: its instances share the GPU. Switch MIG off to see it"
OF_THE_WHOLE_GPU: Final = "NVML reports this only for a whole GPU, not for a MIG instance"
UNREPORTED: Final = "this GPU does not report this reason, so it is never seen here"
NO_ECC: Final = "not supported by this GPU and driver, or ECC is switched off"

TOO_OLD_REASONS: Final = frozenset({BINDING_TOO_OLD, _READING_FAILURES[FUNCTION_NOT_FOUND]})
VANISHED: Final = "the driver no longer lists this GPU: look for Xid 79 in `dmesg`; a reboot usually brings it back"
NO_DEVICES: Final = "the NVIDIA driver is loaded and lists no GPU"


def library_failure(code: int, text: str, root: Path = Path("/")) -> NvmlFailure:
    """The failure of NVML as a whole.

    `text` is the library's own name for the code. Ambiguous codes are decided by the driver's files below `root`: the
    kernel module makes /proc/driver/nvidia/version, and every process opens /dev/nvidiactl.
    """
    if code == BINDING_LACKS:
        return NvmlFailure(f"{PYNVML_MODULE} lacks a function that every GPU needs", REINSTALL)
    if code == LIBRARY_NOT_FOUND and (reason := _not_loaded_reason()) is not None:
        again = "install the driver again, or take the folder of that file out of LD_LIBRARY_PATH"
        return NvmlFailure(f"{UNLOADABLE} ({reason})", again)
    control = root / "dev/nvidiactl"
    if code not in (NO_PERMISSION, DRIVER_NOT_LOADED, UNKNOWN):
        unnamed = NvmlFailure(
            f"NVML does not start: {_coded(text, code)}",
            "See whether `nvidia-smi` works; if not, reboot, or install the driver again",
        )
        return (LIBRARY_FAILURES | DEVICE_FAILURES).get(code, unnamed)
    if (root / "proc/driver/nvidia/version").exists() and not control.exists():
        return NO_DEVICE_NODES
    if control.exists() and (code == NO_PERMISSION or not os.access(control, os.R_OK | os.W_OK)):
        return NO_ACCESS
    if code == UNKNOWN:
        return NvmlFailure(
            f"NVML fails to start and gives no reason (code {code})",
            "a container may have lost its devices, start it again; else look for Xid errors in `dmesg` and reboot",
        )
    return LIBRARY_FAILURES.get(code, NO_ACCESS)


def _not_loaded_reason() -> str | None:
    """The loader's error about the library that it found; None when it finds none, or loads it.

    The binding reports both cases as "not found".
    """
    # Needed only after a failure, while the app's first frame needs this file's sentences.
    import ctypes

    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        message = str(error)
        return None if os.strerror(errno.ENOENT) in message else message
    return None


def is_fatal(code: int) -> bool:
    """True if the GPU or the library is gone, not only one reading."""
    return code in DEVICE_FAILURES or code in LIBRARY_FAILURES


def may_pass(code: int) -> bool:
    """True if a GPU that failed with this code may answer after NVML is opened again."""
    return code in DEVICE_FAILURES


def comes_from_a_driver(sentence: str) -> bool:
    """True if a failure of NVML is the answer of a driver, which a machine without a GPU seldom has.

    Decided from the sentence, because a tick and its record have no more.
    """
    absent = (LIBRARY_FAILURES[LIBRARY_NOT_FOUND], LIBRARY_FAILURES[DRIVER_NOT_LOADED], NO_DEVICE_NODES)
    sentences = (NO_DEVICES, *(failure.sentence for failure in absent))
    return sentence not in sentences and not sentence.startswith((PYNVML_MODULE, UNLOADABLE))


def device_failure(code: int, text: str) -> str:
    """The reason that one GPU does not answer."""
    if code == NO_PERMISSION:
        return "no permission to talk to this GPU: check its /dev/nvidia* file"
    failure = DEVICE_FAILURES.get(code)
    return f"the driver gives no access to this GPU: {_coded(text, code)}" if failure is None else failure.sentence


def reading_failure(code: int, text: str) -> str:
    """The reason that one reading of a GPU is missing."""
    return _READING_FAILURES.get(code, _coded(text, code))


def _coded(text: str, code: int) -> str:
    return text if code == UNREADABLE else f"{text} (code {code})"


def hang_failure(seconds: float, subject: str = "NVML") -> NvmlFailure:
    """The failure of a call into the driver that has not returned for this long."""
    return NvmlFailure(
        f"{subject} {HAS_NOT_ANSWERED} {_digits(seconds)} s: a call into the NVIDIA driver does not come back",
        "Look for Xid errors in `dmesg`; a reboot usually helps",
    )


def slow_call_sentence(seconds: float, subject: str) -> str:
    """A sentence about a slow call: up to `SLOW_S` it mostly returns."""
    if seconds >= SLOW_S:
        return hang_failure(seconds, subject).sentence
    return f"{subject} {HAS_NOT_ANSWERED} {_digits(seconds)} s: the NVIDIA driver is slow with it; it is asked again"


def takes_long(sentence: str) -> bool:
    """True for a sentence about a call that has not returned, rather than about a lost GPU."""
    return HAS_NOT_ANSWERED in sentence


def opening_failure(seconds: float, timeout_s: float) -> NvmlFailure:
    """The failure while a driver is being opened; after `timeout_s` it is treated as hanging."""
    if seconds > timeout_s:
        return hang_failure(seconds)
    return NvmlFailure(
        f"NVML {HAS_NOT_ANSWERED} {max(1, round(seconds))} s: the driver is being opened, which takes seconds for"
        " each GPU without persistence mode"
    )


def _digits(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 1 else f"{seconds:.1f}"


def field_failure(code: int, text: str = "no value") -> str:
    """The reason that a field value is missing; an unknown field number counts as not supported."""
    return reading_failure(NOT_SUPPORTED if code in (INVALID_ARGUMENT, FUNCTION_NOT_FOUND) else code, text)


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
            raise NvmlError(BINDING_LACKS)
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
                raise NvmlError(code if isinstance(code, int) else UNKNOWN, text) from error
            reason = f"the driver's answer cannot be read ({type(error).__name__}: {text})"
            raise NvmlError(UNREADABLE, reason) from error
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
        return library_failure(error.value, str(error))


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
        if is_fatal(error.value):
            raise
        return None, reading_failure(error.value, str(error))


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
        raise NvmlError(UNREADABLE, reason)
    return count


def gpu_count(nv: ModuleType) -> int:
    """The number of GPUs that the driver lists. Raises NvmlError."""
    return possible_count(nv, "gpu_count", nv.nvmlDeviceGetCount)


FIRST_RETRY_NS = 1_000_000_000
_LONGEST_RETRY_NS = 60_000_000_000
"""The first and the longest wait before NVML is opened again."""


class Driver:
    """NVML through its binding. A missing driver or binding raises nothing: `failure` is the reason."""

    def __init__(self) -> None:
        self.nv: ModuleType | None = None
        """The binding, once it was imported."""
        self.is_open = False
        self.version: str | None = None
        self.version_failure: str | None = None
        """The reason that an open driver has no version, or None."""
        self.failure: NvmlFailure | None = None
        """The reason that NVML as a whole does not answer, or None."""
        self.retry_at_ns = 0
        """Before this time NVML is not opened again."""
        self._delay_ns = FIRST_RETRY_NS

    def open(self, find: Callable[[ModuleType], T], t_ns: int) -> T | None:
        """Open NVML; return the result of `find`, or None with `failure` set when NVML does not open."""
        if self.nv is None:
            loaded = load()
            if isinstance(loaded, NvmlFailure):
                self.failure = loaded
                self._postpone(t_ns)
                return None
            self.nv = loaded
        nv = self.nv
        try:
            nv.nvmlInit()
            self.version, self.version_failure = text_or_reason(nv, lambda: as_text(nv.nvmlSystemGetDriverVersion()))
            result = find(nv)
        except NvmlError as error:
            _shut_down(nv)
            self.failure = library_failure(error.value, str(error))
            self._postpone(t_ns)
            return None
        # From here on the GPUs may be read: not before, with handles of an earlier initialization.
        self.is_open = True
        return result

    def fail(self, code: int, text: str, t_ns: int) -> None:
        """Mark the library as failed with this answer, unless it is marked; it is opened again later."""
        if not self.is_open:
            return
        self.is_open = False
        self.failure = library_failure(code, text)
        self._postpone(t_ns)

    def close(self, *, shut_down: bool) -> None:
        """Mark the library as closed, and with `shut_down` close it."""
        if self.nv is not None and self.is_open and shut_down:
            _shut_down(self.nv)
        self.is_open = False
        self.retry_at_ns = 0

    def next_delay_ns(self) -> int:
        """The delay before the next try, 1 s up to 60 s: twice the one before."""
        delay_ns, self._delay_ns = self._delay_ns, min(self._delay_ns * 2, _LONGEST_RETRY_NS)
        return delay_ns

    def reset_delay(self) -> None:
        """Begin with the shortest delay again."""
        self._delay_ns = FIRST_RETRY_NS

    def _postpone(self, t_ns: int) -> None:
        self.retry_at_ns = t_ns + self.next_delay_ns()


def _shut_down(nv: ModuleType) -> None:
    # A binding may lack even this; the process's end closes the driver too.
    with contextlib.suppress(NvmlError):
        nv.nvmlShutdown()
