"""Any text, as `st.text()` makes it, without the seconds in which hypothesis finds out what UTF-8 can encode."""

from hypothesis import strategies as st


def any_text(max_size: int | None = None) -> st.SearchStrategy[str]:
    """Text of any characters but surrogates."""
    return st.text(st.characters(exclude_categories=["Cs"]), max_size=max_size)
