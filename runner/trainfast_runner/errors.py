"""The error that a user causes: one line, with the allowed values and the nearest valid name."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any, TypeVar

MAX_SHOWN = 20
"""The most allowed values that an error lists."""


_ARGUMENTS = ("message", "key", "allowed", "nearest", "advice", "option", "where", "exit_code")
"""The arguments of `UserError`, which are also its attributes; a subclass may have more of these."""


class UserError(Exception):
    """Input that cannot be used. The command line prints it and exits with `exit_code`.

    `nearest` is the valid name closest to a misspelt one, `advice` what to do instead where no name was misspelt.
    `option` replaces `advice` on the command line, as it is typed there.
    `where` is a file and line (`my.toml:7`) or the option it came from; `key` the knob or field at fault.
    """

    def __init__(
        self,
        message: str,
        *,
        key: str | None = None,
        allowed: Iterable[str] | None = None,
        nearest: str | None = None,
        advice: str | None = None,
        option: str | None = None,
        where: str | None = None,
        exit_code: int = 2,
    ) -> None:
        self.message = message
        self.key = key
        self.allowed = None if allowed is None else [str(value) for value in allowed]
        self.nearest = nearest
        self.advice = advice
        self.option = option
        self.where = where
        self.exit_code = exit_code
        super().__init__(self.line())

    def line(self) -> str:
        """The whole error as one line of text, with the advice as typed on the command line."""
        return self._line(self.where, self.option or self.advice)

    def line_without_option(self) -> str:
        """The error as one line for a screen or a journal: without options of the command line."""
        where = None if self.where is not None and self.where.startswith("--") else self.where
        return self._line(where, self.advice)

    def _line(self, where: str | None, advice: str | None) -> str:
        text = f"{where}: {self.message}" if where else self.message
        if self.nearest:
            text += f"; did you mean {self.nearest}?"
        if advice:
            text += f"; try {advice}"
        if self.allowed:
            hidden = len(self.allowed) - MAX_SHOWN
            shown = [*self.allowed[:MAX_SHOWN], *([f"… and {hidden} more"] if hidden > 0 else [])]
            text += f" (allowed: {', '.join(shown)})"
        return " ".join(text.split())

    def at(self, where: str) -> UserError:
        """The same error with this `where`, unless it has one already."""
        located = copy.copy(self)
        located.where = self.where or where
        located.args = (located.line(),)
        return located

    def parts(self) -> dict[str, Any]:
        """The arguments that make this error again, in another process."""
        return {name: getattr(self, name) for name in _ARGUMENTS}

    def as_json(self) -> dict[str, object]:
        """The object behind `error` in what `--json` prints for exit code 2."""
        return {
            "message": self.line(),
            "key": self.key,
            "allowed": self.allowed,
            "nearest": self.nearest or self.option or self.advice,
        }


MIN_LETTERS = 3
"""Fewest letters that count as the beginning of a name."""


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The closest valid name to a misspelt one, or None when nothing is close."""
    by_fold = {name.replace("-", "").replace("_", "").lower(): name for name in names}
    folded = word.replace("-", "").replace("_", "").lower()
    longer = [name for fold, name in by_fold.items() if len(folded) >= MIN_LETTERS and fold.startswith(folded)]
    if len(longer) == 1:
        return longer[0]
    import difflib  # imported late: only an unknown name needs it

    matches = difflib.get_close_matches(folded, by_fold, n=1, cutoff=0.6)
    return by_fold[matches[0]] if matches else None


N = TypeVar("N", int, float)
T = TypeVar("T")


def highest(values: Iterable[N | None]) -> N | None:
    """The highest known value; None without any."""
    return max((value for value in values if value is not None), default=None)


def lowest(values: Iterable[N | None]) -> N | None:
    """The lowest known value; None without any."""
    return min((value for value in values if value is not None), default=None)


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """The mean of the known values; None without any."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def last_known(values: Iterable[T | None]) -> T | None:
    """The last known value; None without any."""
    known = [value for value in values if value is not None]
    return known[-1] if known else None
