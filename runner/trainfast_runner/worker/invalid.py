"""An input that cannot work, said in a way that names the key and the nearest thing that does."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InvalidInput(Exception):
    """A mistake in what the user asked for: the run ends with exit code 2 and this as its record.

    `key` is the knob or field (`seq_len`, `model.hidden_size`, `data.paths`), `allowed` what could stand there,
    `nearest` the most similar allowed name, if any is similar.
    """

    def __init__(
        self, message: str, key: str | None = None, allowed: Iterable[str] = (), nearest: str | None = None
    ) -> None:
        super().__init__(message, key, list(allowed), nearest)
        self.message = message
        self.key = key
        self.allowed = list(allowed)
        self.nearest = nearest

    def __str__(self) -> str:
        return self.message

    def as_fields(self) -> dict[str, object]:
        """The four fields of an `invalid` record."""
        return {"message": self.message, "key": self.key, "allowed": self.allowed, "nearest": self.nearest}


def unknown_name(what: str, name: str, key: str, allowed: Iterable[str]) -> InvalidInput:
    """An `InvalidInput` for a name that does not exist: `what` reads "field of llama's configuration"."""
    names = sorted(allowed)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return InvalidInput(f"{name!r} is not a {what}{hint}", key, names, close[0] if close else None)
