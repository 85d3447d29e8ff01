"""One thread that takes a tick a period, and the function that takes a single one."""

import threading
import time
from collections.abc import Callable
from contextlib import closing

from trainfast_runner.machine.telemetry.host import HostReader, ProcessTree
from trainfast_runner.machine.telemetry.nvml import Nvml, OnXid
from trainfast_runner.records.tick import Tick

_OPENING_S = 1.0
"""Time that a tick waits for the driver to open; the next ticks have the host's readings meanwhile."""
_CLOSING_S = 0.3
"""Time that the end waits for the driver to close, which the end of the process does as well."""


def read_tick(nvml: Nvml, host: HostReader) -> Tick:
    """One tick from readers that are already open; rates cover the time since their last one."""
    t_ns = time.monotonic_ns()
    devices, missing = nvml.sample(t_ns)
    nvml_us = (time.monotonic_ns() - t_ns) // 1000
    reading, host_missing = host.read()
    missing |= host_missing
    sample_us = (time.monotonic_ns() - t_ns) // 1000
    return Tick(t_ns=t_ns, host=reading, devices=devices, missing=missing, sample_us=sample_us, nvml_us=nvml_us)


def take_tick(*, settle_s: float = 0.2, nvml: Nvml | None = None) -> Tick:
    """A single complete tick by `nvml`, which is closed; `settle_s` seconds between two samples make rates real."""
    with closing(nvml or Nvml()) as opened:
        host = HostReader()
        read_tick(opened, host)
        time.sleep(settle_s)
        return read_tick(opened, host)


def next_due_s(due_s: float, period_s: float) -> float:
    """The first moment of a schedule that is still to come: a late tick is not made up for, and lateness does not add
    up. `due_s` (CLOCK_MONOTONIC) is any moment of it."""
    late_s = time.monotonic() - due_s
    return due_s + period_s * (max(0, int(late_s // period_s)) + 1)


class Sampler:
    """Calls `on_tick` with a `Tick` every `period_s` seconds, from one thread of its own.

    `on_tick` must not raise: what it raises ends the sampling and is kept in `failure`.
    """

    def __init__(self, on_tick: Callable[[Tick], None], *, period_s: float = 1.0, on_xid: OnXid | None = None) -> None:
        """`on_xid` gets Xid errors when they happen, from another thread."""
        self.period_s = period_s
        """Seconds between two ticks, above 0; another value holds after the next one. Safe from any thread."""
        self.failure: BaseException | None = None
        """The exception of `on_tick`, or None."""
        self._on_tick = on_tick
        self._on_xid = on_xid
        self._root_pid: int | None = None
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._last_tick = False
        self._thread = threading.Thread(target=self._run, name="telemetry-sampler", daemon=True)

    def start(self) -> None:
        """Start the thread. The first tick is taken at once; it has no rates yet."""
        self._thread.start()

    def set_root_pid(self, pid: int | None) -> None:
        """Add the process tree below `pid` to the coming ticks, or none. Safe from any thread."""
        self._root_pid = pid

    def stop(self, timeout_s: float = 2.0, *, last_tick: bool = False) -> bool:
        """End the sampling and wait for its last tick; False when a call into the driver holds it longer.

        With `last_tick` one more tick is taken first: what happened since the one before it is known only then.
        """
        self._last_tick = last_tick
        self._stopping.set()
        if self._thread.ident is None:
            return True
        has_ended = self._ended.wait(timeout_s)
        self._thread.join(min(timeout_s, _CLOSING_S) if has_ended else 0)
        return has_ended

    def _run(self) -> None:
        # Both readers belong to this thread: NVML does not survive a fork.
        nvml = Nvml(opening_s=_OPENING_S, on_xid=self._on_xid)
        host = HostReader()
        due_s = time.monotonic()
        has_sampled = False
        try:
            while not self._stopping.wait(max(0.0, due_s - time.monotonic())):
                if self._root_pid != (host.tree.root_pid if host.tree else None):
                    host.tree = None if self._root_pid is None else ProcessTree(self._root_pid)
                self._on_tick(read_tick(nvml, host))
                due_s = next_due_s(due_s, self.period_s)
                has_sampled = True
            # Skip the last tick if none was taken: it would open the driver only to close it.
            if self._last_tick and has_sampled:
                self._on_tick(read_tick(nvml, host))
        except BaseException as error:
            self.failure = error
            raise
        finally:
            self._ended.set()
            nvml.close()
