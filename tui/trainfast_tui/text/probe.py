"""What a search's probe is called: one process that tried one batch size after another."""

from __future__ import annotations

from collections.abc import Sequence


def probe_words(tried: Sequence[int]) -> str:
    """`a search's probe at batch_size 62, after 7 and 30`; the batch it is or was at comes last in `tried`."""
    if not tried:
        return "a search's probe"
    *before, last = (f"{batch:,}" for batch in tried)
    after = f", after {' and '.join(filter(None, (', '.join(before[:-1]), before[-1])))}" if before else ""
    return f"a search's probe at batch_size {last}{after}"
