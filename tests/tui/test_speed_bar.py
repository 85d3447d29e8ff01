"""The lines about speed: what it says of a prediction, of turned knobs, of a measurement, and while there is none."""

from dataclasses import replace

import msgspec
import pytest
from recorded import MIB
from still import FULL, SMALL, a_fit, a_snapshot, has, running

from trainfast_runner.memory.headroom import AvailableMemory
from trainfast_runner.records.run_file import PredictedSpeed
from trainfast_tui.control.messages import NextRunPredicted, SnapshotTaken
from trainfast_tui.next_run.sources import NextRunMemory, NextRunSpeed, next_run_from_preset
from trainfast_tui.panels.memory_and_speed import memory_lines, speed_line

PANEL = {FULL: 46, SMALL: 30}
SPEED = PredictedSpeed(median=14.2, low=12.9, high=15.6, basis="3 runs")
PREDICTED = NextRunSpeed(SPEED)


def shown(view, size=FULL):
    """The line as wide as the panel is on a screen of that size."""
    text = "".join(text for text, _ in speed_line(view, PANEL[size])).rstrip()
    assert len(text) <= PANEL[size], text
    return text


def test_a_prediction_is_shown_with_its_interval_and_the_change_of_turned_knobs():
    assert shown(PREDICTED) == "predicted 14.2 samples/s (12.9 to 15.6)"
    assert shown(PREDICTED, SMALL) == "14.2 samples/s (12.9 to 15.6)"
    faster = msgspec.structs.replace(PREDICTED, reference_samples_per_s=10.0)
    assert shown(faster) == "predicted 14.2/s, +42.0 % from 10.0/s"
    assert shown(faster, SMALL) == "14.2/s, +42.0 % from 10.0"
    fit = a_fit(500, AvailableMemory(1024 * MIB, "memory_limit", from_memory_limit=True), activations=500)
    lines = memory_lines(NextRunMemory(fit, reference_bytes=400 * MIB), 46, 48)
    texts = ["".join(text for text, _ in line) for line in lines]
    has(texts, "predicted 500 MiB (+25.0 %) of 1.00 GiB")


@pytest.mark.parametrize("size", [FULL, SMALL])
async def test_the_main_screen_shows_speed_below_memory(home, size):
    async with running(home, size=size) as (app, pilot):
        app.post(SnapshotTaken(a_snapshot(None)))
        text = await pilot.post(NextRunPredicted(NextRunMemory(reason="tracing the model…"), PREDICTED))
        assert text.index("tracing the model") < text.index("14.2 samples/s (12.9 to 15.6)")


def test_the_knobs_before_a_turn_are_those_of_the_preset_or_of_the_run():
    next_run = next_run_from_preset("tiny-llama")
    assert next_run.reference_spec() is None
    turned = next_run.with_value("batch_size", "32").with_value("precision", "bf16")
    before = turned.reference_spec()
    assert (before.knobs["batch_size"], before.knobs["precision"]) == (8, "fp32")
    ran = replace(turned, shown_run_knobs={**turned.spec.knobs, "batch_size": 16}).reference_spec()
    assert (ran.knobs["batch_size"], ran.knobs["precision"]) == (16, "bf16")
