"""Settings put into the calls of a Python script, all other text kept."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from trainfast_runner.errors import UserError
from trainfast_runner.export.call_fields import CallFields
from trainfast_runner.export.python_calls import ByteOffsets, calls_of, parsed

Edit = tuple[int, int, str]
"""Bytes from, bytes to, and the text that replaces them."""


def edit_calls(source: str, file: str, calls: Sequence[CallFields]) -> tuple[str, list[str]]:
    """The script with the settings in the first of `calls` and, where it has none, in all the others.

    Also notes for the user on arguments that are not literals. Raises UserError for a script that is not Python or has
    none of these calls.
    """
    tree = parsed(source, file)
    calls_by_target = [(target, list(calls_of(tree, target.functions))) for target in calls]
    calls_by_target = (
        calls_by_target[:1]
        if calls_by_target[0][1]
        else [(target, nodes) for target, nodes in calls_by_target[1:] if nodes]
    )
    if not calls_by_target:
        names = ", ".join(target.functions[0] for target in calls)
        raise UserError(
            f"{file} calls none of {names}: nothing there takes the settings",
            key="--onto",
            advice="the shell file that starts it",
        )
    offsets = ByteOffsets(source)
    edits: list[Edit] = []
    notes: list[str] = []
    for target, nodes in calls_by_target:
        node = _only_call(target, nodes)
        if node is None:
            lines = ", ".join(str(node.lineno) for node in nodes)
            settings = ", ".join(f"{name}={value!r}" for name, value in target.fields.items() if target.is_added(name))
            name = target.functions[0]
            notes += [f"{file} calls {name} in lines {lines}: the one that trains needs {settings}"] if settings else []
            continue
        edits_of_call, notes_of_call = call_edits(node, target, offsets, file)
        edits += edits_of_call
        notes += notes_of_call
    return with_edits(source, edits), notes


def with_edits(source: str, edits: Sequence[Edit]) -> str:
    """The script with all of these edits, which do not overlap."""
    content = source.encode()
    for begin, end, text in sorted(edits, reverse=True):
        content = content[:begin] + text.encode() + content[end:]
    return content.decode()


def _only_call(target: CallFields, nodes: list[ast.Call]) -> ast.Call | None:
    """The only call, or the only one that shuffles, as a loader for training does; None if several are left."""
    shuffling_calls = [node for node in nodes if any(_is_shuffle(keyword) for keyword in node.keywords)]
    return nodes[0] if len(nodes) == 1 else shuffling_calls[0] if len(shuffling_calls) == 1 else None


def _is_shuffle(keyword: ast.keyword) -> bool:
    return keyword.arg == "shuffle" and getattr(keyword.value, "value", None) is True


def call_edits(node: ast.Call, target: CallFields, offsets: ByteOffsets, file: str) -> tuple[list[Edit], list[str]]:
    """Edits that give a call its arguments, and notes for the user on those that are not literals."""
    starred = next((index for index, argument in enumerate(node.args) if isinstance(argument, ast.Starred)), None)
    arguments = dict(zip(target.order, node.args[:starred], strict=False))
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
    for field, value in target.fields.items():
        name = target.name_in(field, arguments)
        by = arguments.get(target.displaced.get(field, ""))
        if by is not None:
            notes.append(f"{file}:{by.lineno}: {target.displaced[field]} makes the batches: {name} has to be {value!r}")
            continue
        if name not in arguments:
            added += [f"{name}={value!r}"] if target.is_added(field) else []
            continue
        try:
            present_value = ast.literal_eval(arguments[name])
        except (ValueError, TypeError):
            notes.append(
                f"{file}:{arguments[name].lineno}: {name} is {ast.unparse(arguments[name])}: make it {value!r}"
            )
            continue
        if present_value != value:
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
