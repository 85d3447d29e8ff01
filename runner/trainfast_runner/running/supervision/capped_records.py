"""The output and the step records of a run, held under their caps while it trains."""

from __future__ import annotations

from pathlib import Path

from trainfast_runner.records.capped_file import CappedFile
from trainfast_runner.records.output_log import OUTPUT_FILE
from trainfast_runner.records.run_directory import rank_file
from trainfast_runner.records.step_lines import capped_step_file
from trainfast_runner.running.supervision.event_log import EventLog


class CappedRecords:
    """Caps `output.log` at `output_bytes` and each rank's step records at `steps_bytes`; failures become events."""

    def __init__(self, directory: Path, world_size: int, output_bytes: int, steps_bytes: int, events: EventLog) -> None:
        self.output = CappedFile(directory / OUTPUT_FILE, output_bytes)
        self._steps = [capped_step_file(rank_file(directory, "steps", n), steps_bytes) for n in range(world_size)]
        self._events = events

    def trim(self) -> None:
        """Drop the middle of each file that is over its cap."""
        self._trim_file(self.output, "output_trimmed")
        for file in self._steps:
            if file.path.exists():  # else that rank has taken no step yet
                self._trim_file(file, "steps_trimmed")

    def compact(self) -> None:
        """Put one line in place of the dropped bytes; only once no process writes any more."""
        for file in (self.output, *self._steps):
            try:
                file.compact()
            except OSError as error:
                self._events.record_trouble(f"{file.path.name} cannot be compacted: {error.strerror}")

    def _trim_file(self, file: CappedFile, kind: str) -> None:
        truncated_before = file.truncated
        try:
            dropped = file.trim()
        except OSError as error:
            self._events.record_trouble(f"{file.path.name} cannot be trimmed: {error.strerror}")
            return
        if dropped and file.truncated and not truncated_before:
            self._events.record(kind, detail="truncated: this file system cannot punch holes")
        elif dropped and file.dropped_bytes == dropped:
            self._events.record(kind, detail=f"over {file.cap_bytes} bytes: the middle is dropped")
