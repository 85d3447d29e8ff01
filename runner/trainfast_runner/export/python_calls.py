"""Calls in a Python script, and the bytes at which they stand. Nothing is executed."""

from __future__ import annotations

import ast
import bisect
import re
from collections.abc import Iterator, Sequence

from trainfast_runner.errors import UserError


def parsed(source: str, file: str) -> ast.Module:
    """The script as a tree. Raises UserError for one that is not Python."""
    try:
        return ast.parse(source)
    except SyntaxError as error:
        where = f"{file}:{error.lineno}" if error.lineno else file
        raise UserError(f"not Python: {error.msg}", key="--onto", where=where) from None
    except (ValueError, MemoryError, RecursionError):
        # Null bytes before Python 3.11.4, and expressions too deep for the parser.
        raise UserError("Python's parser cannot read it", key="--onto", where=file) from None


def calls_of(tree: ast.AST, functions: Sequence[str]) -> Iterator[ast.Call]:
    """Yield the calls of functions of these names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
            if name in functions:
                yield node


class ByteOffsets:
    """Byte offsets in a script; `ast` counts the bytes of a line in UTF-8."""

    def __init__(self, source: str) -> None:
        self._content = source.encode()
        # Python's parser ends a line at a lone carriage return too.
        self._lines = [0, *(end.end() for end in re.finditer(rb"\r\n?|\n", self._content))]

    def span(self, node: ast.expr | ast.keyword) -> tuple[int, int]:
        """The first byte of a node and the one after it."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = self._lines[node.lineno - 1] + node.col_offset
        return begin, self._lines[node.end_lineno - 1] + node.end_col_offset

    def has_comma(self, node: ast.expr, end: int) -> bool:
        """True if a comma stands after the last argument of a call that ends at `end`."""
        after = self._content[self.span(node)[1] : end]
        return b"," in re.sub(rb"#[^\r\n]*", b"", after)

    def indent_before(self, offset: int) -> str | None:
        """The white space from the line's begin to `offset`; None if other text stands there."""
        line = self._lines[bisect.bisect_right(self._lines, offset) - 1]
        before = self._content[line:offset].decode()
        return None if before.strip() else before
