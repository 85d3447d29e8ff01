"""The error for an input that cannot work: it names the key and the nearest value that works."""

import difflib
import re
from collections.abc import Iterable


class InvalidInput(Exception):
    """A mistake in the input: the run ends with exit code 2 and the record `invalid`.

    `key` is the knob or field (`seq_len`, `model.hidden_size`, `data.paths`), `allowed` its possible values, `nearest`
    the most similar one; None when none is similar.
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
        """Fields of an `invalid` record."""
        return {"message": self.message, "key": self.key, "allowed": self.allowed, "nearest": self.nearest}


def one_line(error: BaseException) -> str:
    """The message of an error, in one line, without transformers' lists of every model."""
    return re.split(r"[.,]? (?:Model type should be|or contain|Should have) one of\b", " ".join(str(error).split()))[0]


def unknown_name(kind: str, name: str, key: str, allowed: Iterable[str]) -> InvalidInput:
    """Make the error for a name that does not exist; `kind` reads "field of llama's configuration"."""
    names = sorted(allowed)
    # `num_layers` is nearer to `num_hidden_layers`, which has both of its words, than to `num_labels`.
    with_its_words = [allowed_name for allowed_name in names if {*name.split("_")} <= {*allowed_name.split("_")}]
    close = sorted(with_its_words, key=len) or difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return InvalidInput(f"{name!r} is not a {kind}{hint}", key=key, allowed=names, nearest=close[0] if close else None)
