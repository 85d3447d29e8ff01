"""`steps.jsonl` and the files of the other ranks: held under a size, with a mark for dropped records."""

from __future__ import annotations

from pathlib import Path

import msgspec

from trainfast_runner.records.capped_file import CAP_BYTES, CappedFile
from trainfast_runner.records.json_lines import WINDOW_BYTES, NoRecord, Tail
from trainfast_runner.records.run_lines import Count, Step

_MARK = b'{"dropped_bytes":'


class Dropped(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a compacted `steps.jsonl`: the step records that stood here, in bytes."""

    dropped_bytes: Count


class StepTail(Tail[Step]):
    """Follows the step records of a rank, dropped ones left out."""

    def __init__(self, path: Path, window_bytes: int = WINDOW_BYTES) -> None:
        super().__init__(path, Step, window_bytes)
        self._marked_bytes = 0
        self._mark_decoder = msgspec.json.Decoder(Dropped)

    @property
    def dropped_bytes(self) -> int:
        """Bytes of dropped step records: the hole in the file, and its marks."""
        return self.hole_bytes + self._marked_bytes

    def decode(self, line: bytes) -> Step:
        """The step of this line. Raises NoRecord for a mark, msgspec.DecodeError for damage."""
        if line.startswith(_MARK):
            self._marked_bytes += self._mark_decoder.decode(line).dropped_bytes
            raise NoRecord
        return super().decode(line)


def capped_step_file(path: Path, cap_bytes: int = CAP_BYTES) -> CappedFile:
    """A rank's step records, held under `cap_bytes` as `output.log` is."""
    return CappedFile(path, cap_bytes, lambda dropped: _MARK + b"%d}\n" % dropped)
