"""Settings put into the calls of a Python script, all other text kept."""

from __future__ import annotations

import ast
import bisect
import re
from collections.abc import Iterator, Sequence

from trainfast_runner.errors import UserError
from trainfast_runner.export.call_fields import CallFields

Edit = tuple[int, int, str]
"""Bytes from, bytes to, and the text that replaces them."""


def edit_calls(source: str, file: str, calls: Sequence[CallFields]) -> tuple[str, list[str]]:
    """The script with the settings in the first of `calls` and, where it has none, in all the others.

    Also notes for the user on arguments that are not literals. Raises UserError for a script that is not Python or has
    none of these calls.
    """
    tree = parsed(source, file)
    called = [(target, list(calls_of(tree, target.functions))) for target in calls]
    called = called[:1] if called[0][1] else [(target, nodes) for target, nodes in called[1:] if nodes]
    if not called:
        names = ", ".join(target.functions[0] for target in calls)
        raise UserError(
            f"{file} calls none of {names}: nothing there takes the settings",
            key="--onto",
            advice="the shell file that starts it",
        )
    offsets = ByteOffsets(source)
    edits: list[Edit] = []
    notes: list[str] = []
    for wanted, nodes in called:
        node = _only_call(wanted, nodes)
        if node is None:
            lines = ", ".join(str(node.lineno) for node in nodes)
            settings = ", ".join(f"{name}={value!r}" for name, value in wanted.fields.items() if wanted.is_added(name))
            name = wanted.functions[0]
            notes += [f"{file} calls {name} in lines {lines}: the one that trains needs {settings}"] if settings else []
            continue
        edits_of_call, notes_of_call = call_edits(node, wanted, offsets, file)
        edits += edits_of_call
        notes += notes_of_call
    return with_edits(source, edits), notes


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


def with_edits(source: str, edits: Sequence[Edit]) -> str:
    """The script with all of these edits, which do not overlap."""
    content = source.encode()
    for begin, end, text in sorted(edits, reverse=True):
        content = content[:begin] + text.encode() + content[end:]
    return content.decode()


def calls_of(tree: ast.AST, functions: Sequence[str]) -> Iterator[ast.Call]:
    """Yield the calls of functions of these names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
            if name in functions:
                yield node


def _only_call(wanted: CallFields, nodes: list[ast.Call]) -> ast.Call | None:
    """The only call, or the only one that shuffles, as a loader for training does; None if several are left."""
    shuffling = [node for node in nodes if any(_is_shuffle(keyword) for keyword in node.keywords)]
    return nodes[0] if len(nodes) == 1 else shuffling[0] if len(shuffling) == 1 else None


def _is_shuffle(keyword: ast.keyword) -> bool:
    return keyword.arg == "shuffle" and getattr(keyword.value, "value", None) is True


def call_edits(node: ast.Call, wanted: CallFields, offsets: ByteOffsets, file: str) -> tuple[list[Edit], list[str]]:
    """Edits that give a call its arguments, and notes for the user on those that are not literals."""
    starred = next((index for index, argument in enumerate(node.args) if isinstance(argument, ast.Starred)), None)
    arguments = dict(zip(wanted.order, node.args[:starred], strict=False))
    arguments |= {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg is not None}
    edits: list[Edit] = []
    added: list[str] = []
    notes = [
        f"{file}:{keyword.value.lineno}: **{ast.unparse(keyword.value)} may hold settings too"
        for keyword in node.keywords
        if keyword.arg is None
    ]
    if starred is not None:
        argument = node.args[starred]
        notes.append(f"{file}:{argument.lineno}: {ast.unparse(argument)} may hold settings too")
    for field, value in wanted.fields.items():
        name = wanted.name_in(field, arguments)
        by = arguments.get(wanted.displaced.get(field, ""))
        if by is not None:
            notes.append(f"{file}:{by.lineno}: {wanted.displaced[field]} makes the batches: {name} has to be {value!r}")
            continue
        if name not in arguments:
            added += [f"{name}={value!r}"] if wanted.is_added(field) else []
            continue
        try:
            now = ast.literal_eval(arguments[name])
        except (ValueError, TypeError):
            notes.append(
                f"{file}:{arguments[name].lineno}: {name} is {ast.unparse(arguments[name])}: make it {value!r}"
            )
            continue
        if now != value:
            edits.append((*offsets.span(arguments[name]), repr(value)))
    return edits + ([_insertion(node, added, offsets)] if added else []), notes


def _insertion(node: ast.Call, added: list[str], offsets: ByteOffsets) -> Edit:
    """New arguments before the last one with a name, on lines of their own if that one has its own."""
    if not node.keywords:
        _, end = offsets.span(node)
        separator = ", " if node.args and not offsets.has_comma(node.args[-1], end - 1) else ""
        return end - 1, end - 1, separator + ", ".join(added)
    last = node.keywords[-1]
    begin, _ = offsets.span(last)
    indent = offsets.indent_before(begin)
    between = ", " if indent is None else f",\n{indent}"
    return begin, begin, "".join(f"{text}{between}" for text in added)


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
