"""The NVML library: imported, opened, and after a failure opened again with a growing delay."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

from trainfast_runner.machine.telemetry import binding, failures
from trainfast_runner.machine.telemetry.binding import as_text, text_or_reason
from trainfast_runner.machine.telemetry.failures import NvmlError, NvmlFailure

T = TypeVar("T")

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
            loaded = binding.load()
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
            self.failure = failures.library_failure(error.value, str(error))
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
        self.failure = failures.library_failure(code, text)
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
