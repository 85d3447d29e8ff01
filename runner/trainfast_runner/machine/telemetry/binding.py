"""NVML's binding `pynvml`: one guarded call, its failures in plain words with the cure, and its impossible values.

The codes are `nvmlReturn_t` of nvml.h. A binding may lack functions; each missing function loses one reading.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeVar

import msgspec

from trainfast_runner.machine.telemetry import throttle
from trainfast_runner.records.tick import MIG_PREFIX, DeviceProcess

T = TypeVar("T")

UNINITIALIZED: Final = 1
INVALID_ARGUMENT: Final = 2
NOT_SUPPORTED: Final = 3
NO_PERMISSION: Final = 4
INSUFFICIENT_SIZE: Final = 7
DRIVER_NOT_LOADED: Final = 9
TIMEOUT: Final = 10
LIBRARY_NOT_FOUND: Final = 12
FUNCTION_NOT_FOUND: Final = 13
GPU_IS_LOST: Final = 15
RESET_REQUIRED: Final = 16
LIB_RM_VERSION_MISMATCH: Final = 18
UNKNOWN: Final = 999
UNREADABLE: Final = -1
"""Ours: the call raised something else than an error of NVML, such as a decoding error."""
BINDING_LACKS: Final = -2
"""Ours: the binding has no such function."""


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
        "no NVIDIA driver here: libnvidia-ml.so.1 was not found, or cannot be loaded",
        "Install the driver; in a container, start it with --gpus all; if the file is elsewhere, put its folder in"
        " LD_LIBRARY_PATH",
    ),
    DRIVER_NOT_LOADED: NvmlFailure(
        "the NVIDIA kernel module is not loaded", "run `sudo modprobe nvidia`, or reboot after a driver installation"
    ),
    LIB_RM_VERSION_MISMATCH: NvmlFailure(
        "the driver was updated under the running system", "reboot, or reload the nvidia kernel modules"
    ),
    UNINITIALIZED: NvmlFailure("the connection to the NVIDIA driver was lost: trying again"),
}
"""Failures of the whole library: no GPU answers until it is initialized again."""
DEVICE_FAILURES: Final = {
    GPU_IS_LOST: NvmlFailure(
        "GPU is lost: it no longer answers on its bus",
        "Look for Xid 79 in `dmesg`, check power cables and temperature; a reboot usually brings it back",
    ),
    RESET_REQUIRED: NvmlFailure(
        "GPU needs a reset", "end its processes and run `sudo nvidia-smi --gpu-reset`, or reboot"
    ),
}
"""Failures of one GPU: the others keep reporting, and it may answer after NVML is opened again."""
NO_DEVICE_NODES: Final = NvmlFailure(
    "the NVIDIA driver is loaded, but /dev/nvidiactl is not there",
    "in a container, start it with --gpus all; else run `sudo nvidia-modprobe -c 0 -u`",
)
NO_ACCESS: Final = NvmlFailure(
    "no permission to talk to the NVIDIA driver",
    "give this user the /dev/nvidia* files (often the group video or render); in a container, start it with --gpus all",
)
NO_BINDING: Final = NvmlFailure(
    "the pynvml module cannot be imported, or lacks functions", "pip install --force-reinstall nvidia-ml-py"
)
BINDING_TOO_OLD: Final = "the installed pynvml module is too old for this reading: pip install --upgrade nvidia-ml-py"
_OPENING_FAILURES: Final = {
    **LIBRARY_FAILURES,
    **DEVICE_FAILURES,
    NO_PERMISSION: NO_ACCESS,
    BINDING_LACKS: NO_BINDING,
    UNKNOWN: NvmlFailure(
        "NVML fails to start and gives no reason (code 999)",
        "a container may have lost its devices, start it again; else look for Xid errors in `dmesg` and reboot",
    ),
}
UNSUPPORTED: Final = "not supported by this GPU and driver"
_READING_FAILURES: Final = {
    NOT_SUPPORTED: UNSUPPORTED,
    NO_PERMISSION: "the driver gives this to administrators only",
    FUNCTION_NOT_FOUND: "the installed driver is too old for this reading",
    INSUFFICIENT_SIZE: "the driver lists more processes than are looked at (256)",
    BINDING_LACKS: BINDING_TOO_OLD,
}
LASTING: Final = frozenset((INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, BINDING_LACKS))
"""Failures of a reading that stay: any other may pass, and is asked for again next tick."""
UNIFIED_MEMORY: Final = (
    "not supported by this GPU and driver: a GPU that shares the host's memory (GB10, Jetson) has none of its own; "
    "the host's memory is its limit"
)
OF_THE_WHOLE_GPU: Final = "NVML reports this only for a whole GPU, not for a MIG instance"
UNREPORTED: Final = "this GPU does not report this reason, so it is never seen here"
TOO_OLD_REASONS: Final = frozenset((BINDING_TOO_OLD, _READING_FAILURES[FUNCTION_NOT_FOUND]))
VANISHED: Final = "the driver no longer lists this GPU: look for Xid 79 in `dmesg`; a reboot usually brings it back"
NO_DEVICES: Final = "the NVIDIA driver is loaded and lists no GPU"
HANGS_AFTER_S: Final = 15.0
"""Seconds after which a call is treated as hanging; until then it mostly returns."""


def library_failure(code: int, text: str, root: Path = Path("/")) -> NvmlFailure:
    """The failure of NVML as a whole.

    `text` is the library's own name for the code. Ambiguous codes are decided by the driver's files below `root`: the
    kernel module makes /proc/driver/nvidia/version, and every process opens /dev/nvidiactl.
    """
    if code in (NO_PERMISSION, DRIVER_NOT_LOADED, UNKNOWN):
        control = root / "dev/nvidiactl"
        if not control.exists() and (root / "proc/driver/nvidia/version").exists():
            return NO_DEVICE_NODES
        if control.exists() and not os.access(control, os.R_OK | os.W_OK):
            return NO_ACCESS
    cure = "See whether `nvidia-smi` works; if not, reboot, or install the driver again"
    return _OPENING_FAILURES.get(code) or NvmlFailure(f"NVML does not start: {_coded(text, code)}", cure)


def comes_from_a_driver(sentence: str) -> bool:
    """True if a failure of NVML is the answer of a driver, which a machine without a GPU seldom has.

    Decided from the sentence, because a tick and its record have no more.
    """
    absent = (LIBRARY_FAILURES[LIBRARY_NOT_FOUND], LIBRARY_FAILURES[DRIVER_NOT_LOADED], NO_DEVICE_NODES, NO_BINDING)
    return sentence not in (NO_DEVICES, *(failure.sentence for failure in absent))


def device_failure(code: int, text: str) -> str:
    """The reason that one GPU does not answer."""
    if code == NO_PERMISSION:
        return "no permission to talk to this GPU: check its /dev/nvidia* file"
    failure = DEVICE_FAILURES.get(code)
    return f"the driver gives no access to this GPU: {_coded(text, code)}" if failure is None else failure.sentence


def reading_text(error: NvmlError) -> str:
    """The reason that one reading of a GPU is missing."""
    return _READING_FAILURES.get(error.value, _coded(str(error), error.value))


def reading_failure(error: NvmlError) -> str:
    """As `reading_text`. Raises the error if the GPU or the library is gone."""
    if error.value in DEVICE_FAILURES or error.value in LIBRARY_FAILURES:
        raise error
    return reading_text(error)


def _coded(text: str, code: int) -> str:
    return text if code == UNREADABLE else f"{text} (code {code})"


def slow_call_sentence(seconds: float, subject: str = "NVML") -> str:
    """A sentence about a call into the driver that has not returned for this long."""
    waited = f"{subject} has not answered for {seconds:.{0 if seconds >= 1 else 1}f} s"
    if seconds < HANGS_AFTER_S:
        return f"{waited}: the NVIDIA driver is slow with it; it is asked again"
    cure = "Look for Xid errors in `dmesg`; a reboot usually helps"
    return f"{waited}: a call into the NVIDIA driver does not come back. {cure}"


def opening_failure(seconds: float) -> NvmlFailure:
    """The failure while a driver is being opened."""
    if seconds > HANGS_AFTER_S:
        return NvmlFailure(slow_call_sentence(seconds))
    meanwhile = "the driver is being opened, which takes seconds for each GPU without persistence mode"
    return NvmlFailure(f"NVML has not answered for {max(1, round(seconds))} s: {meanwhile}")


def call(function: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """The function's answer. Raises NvmlError alone, so that an answer that cannot be read loses only its reading."""
    try:
        return function(*arguments, **options)
    except NvmlError:
        raise
    except Exception as error:
        try:
            text = " ".join(str(error).split())
        except Exception as unreadable:  # the text of an NVML error is the driver's
            text = type(unreadable).__name__
        if isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
            raise NvmlError(BINDING_LACKS, text) from error
        # Every error of the binding, and no other, has the code as its `value`.
        if isinstance(code := getattr(error, "value", None), int):
            raise NvmlError(code, text) from error
        raise NvmlError(UNREADABLE, f"the driver's answer cannot be read ({type(error).__name__}: {text})") from error


def load() -> ModuleType:
    """Import pynvml. Raises NvmlError."""
    try:
        import pynvml
    except Exception as error:  # a broken or foreign module raises anything
        raise NvmlError(BINDING_LACKS, str(error)) from error
    module: ModuleType = pynvml
    return module


def ask_once(read: Callable[[ModuleType], T]) -> T | NvmlFailure:
    """Open NVML, return the result of `read`, and close NVML; if it does not answer, return its failure."""
    try:
        nv = load()
        call(lambda: nv.nvmlInit())
        try:
            return call(read, nv)
        finally:
            shut_down(nv)
    except NvmlError as error:
        return library_failure(error.value, str(error))


def shut_down(nv: ModuleType) -> None:
    """Close NVML. The end of the process does that too, so a failure is no matter."""
    answer_or_none(lambda: nv.nvmlShutdown())


def answer_or_none(ask: Callable[..., T], *arguments: Any) -> T | None:
    """The answer, or None when this GPU, driver or binding gives none."""
    try:
        return call(ask, *arguments)
    except NvmlError:
        return None


def _text(text: str) -> str:
    """A string of NVML. Raises ValueError for one that is no text."""
    if not text.strip() or not text.isprintable():
        raise ValueError(f"{text!r} is no text")
    return text


def uuid_of(nv: ModuleType, handle: Any) -> str:
    """The UUID of a GPU or MIG instance. Raises ValueError for one that CUDA would not take."""
    uuid = _text(nv.nvmlDeviceGetUUID(handle))
    if not uuid.startswith(("GPU-", MIG_PREFIX)):
        raise ValueError(f"{uuid!r} is no UUID")
    return uuid


def name_of(nv: ModuleType, handle: Any) -> str:
    """The name of a GPU or MIG instance. Raises ValueError for one that is no text."""
    return _text(nv.nvmlDeviceGetName(handle))


def driver_version(nv: ModuleType) -> str:
    """The driver's version. Raises ValueError for one that is no text."""
    return _text(nv.nvmlSystemGetDriverVersion())


def gpu_count(nv: ModuleType, instances_of: Any = None) -> int:
    """The number of GPUs that the driver lists, or of the MIG slots of a GPU.

    Raises NvmlError also for an impossible one, which nobody may count through.
    """
    slots = instances_of is not None
    count = call(lambda: nv.nvmlDeviceGetMaxMigDeviceCount(instances_of) if slots else nv.nvmlDeviceGetCount())
    if (reason := refusal("gpu_count", count)) is not None:
        raise NvmlError(UNREADABLE, reason)
    return int(count)


IMPOSSIBLE: Final = "the driver's answer is impossible"
_TEN_YEARS_S: Final = 10 * 365 * 86400
_RANGES: Final[dict[str, tuple[float, float]]] = {
    "percent": (0, 100),
    "fan_percent": (0, 120),
    "c": (0, 150),
    "degrees_to_slowdown_c": (-50, 150),
    "w": (0, 5_000),
    "mj": (0, 5_000_000 * _TEN_YEARS_S),
    "mhz": (0, 5_000),
    **dict.fromkeys(("memory_clock_mhz", "memory_clock_max_mhz"), (0, 30_000)),
    "ns": (0, _TEN_YEARS_S * 1_000_000_000),
    "errors": (0, 1_000_000_000),
    "count": (0, 1_024),
    "power_limit_w": (1, 5_000),
    "sm_clock_max_mhz": (1, 5_000),
    "bytes": (0, (1 << 64) - 1),
    "memory_total_bytes": (1, 1 << 50),
    **dict.fromkeys(("memory_used_bytes", "memory_free_bytes"), (0, 1 << 50)),
    **dict.fromkeys(("slowdown_temperature_c", "shutdown_temperature_c"), (1, 150)),
    **dict.fromkeys(("gpu_max_temperature_c", "memory_max_temperature_c"), (1, 150)),
    **dict.fromkeys(("corrected", "uncorrected"), (0, 100_000)),
    **dict.fromkeys(("pending", "failed"), (0, 1)),
    **dict.fromkeys(("pcie_generation", "pcie_generation_max"), (1, 10)),
    **dict.fromkeys(("pcie_width", "pcie_width_max"), (1, 32)),
}
"""The lowest and the highest value of a reading by its name, else by its unit, the last word of the name.

Chosen, not measured, well beyond any product, since only garbage must fall out: boards of 2026 take up to 1,400 W and
have up to 288 GB and 32 lanes, NVML's manual has fans above 100 %, and 512 rows of a memory can be remapped. Counters
may grow for ten years.
"""
_MOST_UNKNOWN_REASONS: Final = 4
"""Chosen, not measured: throttle bits without a name at once. Drivers have added one at a time."""
_MAX_PID: Final = 1 << 22
"""PID_MAX_LIMIT of Linux with 64 bits (include/linux/threads.h)."""
_KNOWN_REASONS: Final = sum(reason.bit for reason in throttle.REASONS)


def refusal(name: str, value: Any) -> str | None:
    """The reason that a value of this reading is impossible; None for any other, and for a reading without a range."""
    if value is None:
        return None
    if limits := _RANGES.get(name) or _RANGES.get(name.rpartition("_")[2]):
        low, high = limits
        return None if low <= value <= high else f"{IMPOSSIBLE}: {value:,} is not between {low:,} and {high:,}"
    if name == "throttle_reasons" and (value & ~_KNOWN_REASONS).bit_count() > _MOST_UNKNOWN_REASONS:
        return f"{IMPOSSIBLE}: {value:#x}"
    if name == "compute_capability" and not re.fullmatch(r"[1-9]\d?\.\d", value):
        return f"{IMPOSSIBLE}: {value}"
    return None


def drop_impossible(values: dict[str, Any]) -> dict[str, str]:
    """Set the impossible values to None, by field of `DeviceReading`; return the reasons by field.

    The driver answers with success and an impossible value too.
    """
    reasons = {name: reason for name, value in values.items() if (reason := refusal(name, value)) is not None}
    total_bytes = values.get("memory_total_bytes") or 1 << 50
    for name in ("memory_used_bytes", "memory_free_bytes"):
        if (values.get(name) or 0) > total_bytes:
            reasons.setdefault(name, f"{IMPOSSIBLE}: {values[name]:,} of {total_bytes:,} bytes")
    values.update(dict.fromkeys(reasons))
    if listed := values.get("processes"):
        values["processes"] = [
            process if (process.memory_used_bytes or 0) <= total_bytes else DeviceProcess(pid=process.pid)
            for process in listed
            if 0 < process.pid <= _MAX_PID
        ]
        if wrong_pids := [str(process.pid) for process in listed if not 0 < process.pid <= _MAX_PID]:
            reasons["processes.pid"] = f"{IMPOSSIBLE} for process {', '.join(wrong_pids[:3])}"
    return reasons
