"""A batch of 1 that does not fit says by how much, whatever is known of it."""

from __future__ import annotations

import pytest

from trainfast_runner.records.result import OomExplanation
from trainfast_runner.search.batch.nothing_fits import missing_bytes
from trainfast_runner.search.journal.batch import Probe

MIB = 1 << 20


@pytest.mark.parametrize(
    ("expected", "peak", "missing"),
    [
        (OomExplanation(missing_bytes=70 * MIB, asked_bytes=MIB, limit_bytes=100 * MIB), 90 * MIB, 70 * MIB),
        (OomExplanation(asked_bytes=MIB, limit_bytes=100 * MIB), 130 * MIB, 30 * MIB),
        (OomExplanation(asked_bytes=MIB, limit_bytes=100 * MIB), 90 * MIB, MIB),
        (OomExplanation(asked_bytes=MIB), None, MIB),
        (OomExplanation(), 90 * MIB, None),
    ],
    ids=["predicted", "reached beyond the limit", "asked for", "nothing but what was asked for", "nothing"],
)
def test_what_is_missing(expected: OomExplanation, peak: int | None, missing: int | None) -> None:
    failed = Probe(batch_size=1, outcome="oom", run_id="r", seconds=1.0, peak_allocated_bytes=peak)
    assert missing_bytes(expected, failed) == missing
