"""Steps counted in a script's output, where no hook can: one for each line that a regular expression matches."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from pathlib import Path

from trainfast_runner.errors import UserError
from trainfast_runner.records.capped_file import CappedFile, GrowingLog
from trainfast_runner.records.json_lines import Appender
from trainfast_runner.records.run_directory import rank_file
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.records.run_lines import Step


def step_pattern(pattern: str) -> re.Pattern[str]:
    """The regular expression of `--steps-from-log`; its group `loss`, if it has one, is the step's loss.

    Raises UserError.
    """
    if not pattern:
        raise UserError("--steps-from-log is empty: every line would count", key="--steps-from-log")
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise UserError(f"--steps-from-log {pattern!r}: {error}", key="--steps-from-log") from None


class LogSteps:
    """Follows `output.log` and appends the steps to `steps.jsonl`.

    A line carries no time: steps read at one poll share the time since the last poll that read a step.
    """

    def __init__(self, run: RunFile, directory: Path, output: CappedFile) -> None:
        script = run.script
        self._pattern = step_pattern(script.steps_from_log) if script and script.steps_from_log else None
        self._warmup = script.timing_warmup if script else 0
        self._samples = script.samples_per_step if script else None
        self._path = rank_file(directory, "steps", 0)
        # A progress bar redraws its line with carriage returns.
        self._log = GrowingLog(output.path, from_begin=True, separators=rb"[\r\n]", head_bytes=output.head_bytes)
        self._counted = 0
        self._last_ns = run.clock.monotonic_ns
        self._file: Appender | None = None

    def follow(self, *, to_the_end: bool = False) -> None:
        """Record the steps printed since the last call; `to_the_end` of the output once nothing more is printed.

        Does nothing without a pattern. Raises OSError.
        """
        pattern = self._pattern
        if pattern is None:
            return
        matches = [match for line in self._lines(to_the_end) if (match := pattern.search(line)) is not None]
        if not matches:
            return
        now_ns = time.monotonic_ns()
        step_ns = (now_ns - self._last_ns) // len(matches)
        if self._file is None:
            self._file = Appender(self._path)
        for match in matches:
            self._counted += 1
            self._last_ns += step_ns
            self._file.write(
                Step(
                    t_ns=self._last_ns,
                    step=self._counted,
                    warmup=self._counted <= self._warmup,
                    samples=self._samples,
                    loss=_loss(match),
                    step_ms=step_ns / 1e6,
                )
            )
        self._last_ns = now_ns

    def _lines(self, to_the_end: bool) -> Iterator[str]:
        """Yield the lines printed since the last call, oldest first: those of one look at the log, or all."""
        while (lines := self._log.read()) is not None:
            yield from lines
            if not to_the_end:
                return
        if to_the_end:
            yield self._log.unfinished()


def _loss(match: re.Match[str]) -> float | None:
    """The number in the group `loss`; None without one."""
    try:
        loss = float(match.groupdict().get("loss") or "nan")
    except ValueError:
        return None
    return loss if math.isfinite(loss) else None
