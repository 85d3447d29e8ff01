"""The expected start of a process, and the untimed seconds of a warm trial, from a best-fit search's journal."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from trainfast_runner.search.journal.best import BestLine, ProcessReady, Trial

KnobsKey = tuple[tuple[str, object], ...]
"""Knobs and their values as a dictionary key; for a process, the knobs that need a new process."""
GUESSED_START_S, GUESSED_COMPILATION_S, GUESSED_SWITCH_S = 10.0, 40.0, 0.3
"""Assumed before the first process start, the first compilation and the first warm trial."""


def knobs_key(knobs: Mapping[str, object]) -> KnobsKey:
    """Return knobs and their values as a key."""
    return tuple(sorted(knobs.items(), key=lambda item: item[0]))


class ProcessStarts:
    """Seconds until a process takes its first timed step, by its key."""

    def __init__(self, lines: Sequence[BestLine]) -> None:
        untimed_s: dict[str, float] = {}
        for line in lines:
            if isinstance(line, Trial) and not line.warm and line.run_id not in untimed_s:
                untimed_s[line.run_id] = _untimed_s(line)
        starts_s: dict[KnobsKey, list[float]] = defaultdict(list)
        for line in lines:
            if isinstance(line, ProcessReady):
                starts_s[knobs_key(line.process_knobs)].append(line.start_s + untimed_s.get(line.run_id, 0.0))
        self._measured_s = {key: statistics.median(seconds) for key, seconds in starts_s.items()}
        self._guessed_s: dict[KnobsKey, float] = {}

    def seconds(self, key: KnobsKey) -> float:
        """Return the measured start of this process, else that of the most similar one."""
        if key in self._measured_s:
            return self._measured_s[key]
        if key not in self._guessed_s:
            self._guessed_s[key] = self._guess_s(key)
        return self._guessed_s[key]

    def _guess_s(self, key: KnobsKey) -> float:
        compilation_s = GUESSED_COMPILATION_S if _compiles(key) else 0.0
        if not self._measured_s:
            return GUESSED_START_S + compilation_s
        similar_keys = [other_key for other_key in self._measured_s if _compiles(other_key) == _compiles(key)]
        knobs = dict(key)
        _, start_s = max(
            (sum(knobs.get(name) == value for name, value in other_key), self._measured_s[other_key])
            for other_key in similar_keys or self._measured_s
        )
        return start_s if similar_keys else start_s + compilation_s


def _compiles(key: KnobsKey) -> bool:
    return dict(key).get("compile", "off") != "off"


def switch_seconds(trials: Iterable[Trial]) -> float:
    """Return the median seconds of a warm trial without its timed steps."""
    return statistics.median([_untimed_s(trial) for trial in trials if trial.warm] or [GUESSED_SWITCH_S])


def _untimed_s(trial: Trial) -> float:
    return max(0.0, trial.seconds - sum(trial.step_ms) / 1000)
