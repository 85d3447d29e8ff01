"""Untrusted text made safe: one harmless line for a terminal, comments and words in files of other languages."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence

from trainfast_runner.errors import UserError

_CONTROLS = "\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f"
"""C0 and C1, save those that separate words."""
_INVISIBLE = "\u061c\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff"
"""Bidirectional overrides and characters without width."""
# A whole sequence first, so that its parameters go with it; then every control that is left alone.
_UNSAFE = re.compile(
    r"(?:\x1b[\]P^_X]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)"  # OSC DCS PM APC SOS
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI
    r"|\x1b[ -/]*[0-~]"  # two-character escapes and character set choices
    f"|[{_CONTROLS}{_INVISIBLE}]"
)
_SEPARATORS = re.compile(r"[\n\r\v\f\x85\u2028\u2029]")
_SURROGATES = re.compile(r"[\ud800-\udfff]")
_RAW_IN_STRINGS = re.compile(f"[\x7f-\x9f{_INVISIBLE}]")
"""Characters that JSON and TOML may leave as they are in a string, and a terminal obeys."""
_NOT_IN_A_WORD = re.compile(f"[{_CONTROLS}\v\f\r\x85{_INVISIBLE}]")
_CODING = re.compile(r"coding(?=[:=])")
"""The name of an encoding, which Python looks for in the comments of a file's first two lines (PEP 263)."""


def plain(text: str) -> str:
    """Return untrusted text as one harmless line.

    Control sequences, C0 and C1 controls and bidirectional overrides go; tabs and line ends become spaces;
    a lone surrogate becomes U+FFFD, because a terminal's encoder would raise on it.
    """
    # Every removed character is unprintable (Unicode categories C and Z), and nearly all text is printable.
    if text.isprintable():
        return text
    text = _UNSAFE.sub("", text)
    text = _SEPARATORS.sub(" ", text)
    return _SURROGATES.sub("\ufffd", text).expandtabs(8)


def comments(sentences: Iterable[str]) -> list[str]:
    """Return each sentence as a comment line of Python, YAML, TOML or a shell: no text in it begins another line."""
    return [
        "# " + _CODING.sub("coding ", "".join(sign if sign.isprintable() else " " for sign in plain(sentence)))
        for sentence in sentences
    ]


def escaped(text: str) -> str:
    """Return JSON or TOML with every character of a string that a terminal would obey as its number: `\\u009b`."""
    return _RAW_IN_STRINGS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def shell_line(words: Sequence[str]) -> str:
    """Return the words as a shell reads them. Raises UserError for a control character, which no shell can quote."""
    for word in words:
        if match := _NOT_IN_A_WORD.search(word):
            raise UserError(
                f"{plain(word)[:40]!r} contains the control character U+{ord(match[0]):04X}, which no command can hold",
                key="--to",
                advice="--to preset",
            )
    return shlex.join(words)


def file_name(stem: str, ending: str) -> str:
    """Return a file's name, never a path, from a stem of any characters."""
    return (re.sub(r"[^\w.+-]+", "-", stem)[:64].strip(".-") or "run") + ending
