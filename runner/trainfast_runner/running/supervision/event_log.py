"""The events of one run as its supervisor appends them to `events.jsonl`."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from trainfast_runner.records.json_lines import Appender
from trainfast_runner.records.run_directory import EVENTS_FILE
from trainfast_runner.records.run_lines import Event


class EventLog:
    """Appends events. A disk that takes none is no reason to stop supervising."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / EVENTS_FILE
        self._appender: Appender | None = None
        self._troubles: set[str] = set()

    def record(self, kind: str, **fields: object) -> None:
        """Append an event of this moment."""
        self.append(msgspec.convert({"t_ns": time.monotonic_ns(), "kind": kind, **fields}, Event))

    def record_trouble(self, detail: str) -> None:
        """Append a failure to write or read a file, once."""
        if detail not in self._troubles:
            self._troubles.add(detail)
            self.record("trouble", detail=detail)
            _print_to_log(detail)

    def append(self, event: Event) -> None:
        """Append an event; where that fails, the reason goes to supervisor.log."""
        try:
            if self._appender is None:
                self._appender = Appender(self._path)
            self._appender.write(event)
        except OSError as error:
            _print_to_log(f"{EVENTS_FILE}: {error.strerror}")


def _print_to_log(line: str) -> None:
    """Write a line to supervisor.log, which is standard error; on a full disk it is lost."""
    try:
        os.write(2, f"{line}\n".encode())
    except OSError:
        return
