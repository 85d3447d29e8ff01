"""Fields shared by the reports of both kinds of search."""

from __future__ import annotations

from typing import Any

import msgspec

from trainfast_runner.records.run_file import SCHEMA


def first_fields(question: msgspec.Struct, end_line: msgspec.Struct | None) -> dict[str, Any]:
    """Return the first fields of a report, from a journal's first line and its end; `end_line` is None before that."""
    end = {"state": None, "reason": ""} if end_line is None else fields_of(end_line, "state", "reason")
    return {"schema": SCHEMA, **fields_of(question, "search_id"), **end, **fields_of(question, "preset", "variant")}


def fields_of(struct: msgspec.Struct | None, *names: str) -> dict[str, Any]:
    """Return these fields of `struct` by name; every value is None without a struct."""
    return {name: None if struct is None else getattr(struct, name) for name in names}
