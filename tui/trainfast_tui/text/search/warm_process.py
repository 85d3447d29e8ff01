"""The runs of a search: by their role, and a warm process by the sizes or settings that it tried."""

from __future__ import annotations

from collections.abc import Sequence

from trainfast_runner.records.roles import COLD
from trainfast_runner.worker.shared.search_roles import CONFIRMATION, PROBE, TRIAL

ROLE_WORDS = {
    PROBE: "a search's probe",
    TRIAL: "a search's trials",
    CONFIRMATION: "a search's confirmation run",
    COLD: "a search's run",
}
"""The names of a search's runs by their roles."""


def warm_words(role: str | None, tried: Sequence[int]) -> str:
    """Name a warm process by the sizes or settings it tried: `a search's probe at batch_size 62, after 7`."""
    if not tried:
        return ROLE_WORDS[TRIAL if role == TRIAL else PROBE]
    if role == TRIAL:
        return "a search's trial of a setting" if len(tried) == 1 else f"a search's trials of {len(tried)} settings"
    *before, last = (f"{batch:,}" for batch in tried)
    after = f", after {' and '.join(filter(None, (', '.join(before[:-1]), before[-1])))}" if before else ""
    return f"a search's probe at batch_size {last}{after}"
