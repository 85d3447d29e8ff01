"""The one tracer process of the app, for all threads that predict or explain."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainfast_runner.memory.warm_tracer import WarmTracer


class SharedTracer:
    """Holds the tracer, which the first thread that traces makes: the app's first frame imports nothing for it."""

    def __init__(self) -> None:
        self._tracer: WarmTracer | None = None
        self._lock = threading.Lock()

    def get(self) -> WarmTracer:
        """Return the tracer; the same for every thread."""
        from trainfast_runner.memory.warm_tracer import WarmTracer

        with self._lock:
            if self._tracer is None:
                self._tracer = WarmTracer()
            return self._tracer

    def close(self) -> None:
        """End the tracer's process, if there is one."""
        if self._tracer is not None:
            self._tracer.close()
