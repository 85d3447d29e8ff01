"""The groups of knobs, in the order in which the panel and the help list them."""

from __future__ import annotations

from trainfast_runner.settings.knobs import KNOBS

GROUPS = ("batch", "compute", "memory", "data", "parallel", "optimization", "run")
"""The most turned first; a group that is not listed comes last."""


def knobs_by_group() -> dict[str, list[str]]:
    """Return the names of all knobs by group."""
    by_group: dict[str, list[str]] = {group: [] for group in GROUPS}
    for entry in KNOBS:
        by_group.setdefault(entry.group, []).append(entry.name)
    return by_group


KNOBS_IN_ORDER = tuple(name for names in knobs_by_group().values() for name in names)
"""The names of all knobs, group after group."""
