"""The next run's memory and speed: what their lines say of a prediction, a limit, a measurement, and of none."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded import GIB, MIB, a_run
from rich.cells import cell_len
from still import FULL, SMALL, a_fit, a_live_run, a_snapshot, has, running

from trainfast_runner.memory.headroom import AvailableMemory
from trainfast_runner.records.run_file import PredictedSpeed
from trainfast_tui.control.messages import NextRunPredicted, SnapshotTaken
from trainfast_tui.next_run.sources import NextRunMemory, NextRunSpeed, next_run_from_preset
from trainfast_tui.panels.memory_and_speed import LIMIT_SIGN, PART_SIGNS, Predictions, memory_lines, speed_line
from trainfast_tui.text.device_lines import bar
from trainfast_tui.text.format import to_ascii

PANEL = {FULL: 46, SMALL: 30}
PARTS = {"params": 200, "grads": 200, "optimizer": 400, "activations": 600}
LIMITED = AvailableMemory(2 * GIB, "memory_limit", from_memory_limit=True)
FITS = a_fit(1400, LIMITED, max_batch=16, **PARTS)


def shown(view, size=FULL):
    """The bar's lines as wide as the panel is on a screen of that size."""
    lines = memory_lines(view, PANEL[size], size[1])
    texts = ["".join(text for text, _ in line).rstrip() for line in lines]
    assert all(len(text) <= PANEL[size] for text in texts), texts
    return texts


def test_the_prediction_stands_by_category_each_with_its_own_sign_against_the_limit():
    title, bar, *legend, total, left = shown(NextRunMemory(FITS))
    assert title.startswith("memory at its peak: forward and backward ")
    assert len(bar) == 46
    assert [bar.count(sign) for sign in "█▓▒░"] == [5, 4, 9, 13], "each category in proportion"
    assert bar.endswith("·┃"), "what is free, and the limit"
    assert "█ parameters 200 MiB" in legend[0]
    assert "▓ gradients 200 MiB" in legend[0]
    assert "▒ optimizer 400 MiB" in legend[1]
    assert "░ activations 600 MiB" in legend[1]
    assert total == "predicted 1.37 GiB of 2.00 GiB (memory_limit)"
    assert left == "648 MiB left  batch_size up to 16"
    lines = [to_ascii(line) for line in shown(NextRunMemory(FITS))]
    assert lines[1].startswith("#####%%%%+++++++++:::")
    assert "# parameters 200 MiB" in lines[2]
    assert lines[1].endswith("|")
    signs = [sign for sign, _ in PART_SIGNS.values()] + ["·", LIMIT_SIGN]
    assert len({to_ascii(sign) for sign in signs}) == len(signs)
    _, bar, *key, _, _ = shown(NextRunMemory(a_fit(1400, LIMITED, max_batch=16, params=100, frozen=500, quantized=800)))
    assert [bar.count(sign) for sign in "█╱╲"] == [2, 11, 18]
    assert "╱ frozen 500 MiB" in "".join(key)
    assert "╲ quantized 800 MiB" in "".join(key)


def test_what_does_not_fit_says_by_how_much_and_a_context_counts_where_the_room_is_the_devices():
    large = a_fit(4096, LIMITED, activations=4096, max_batch=0)
    lines = shown(NextRunMemory(large))
    assert (lines[1][23], lines[1].count("░"), lines[-1]) == ("┃", 45, "2.00 GiB too much; batch_size 1 does not fit")
    lines = shown(NextRunMemory(replace(large, max_batch=3)))
    assert lines[-1] == "2.00 GiB too much  batch_size up to 3"
    free = AvailableMemory(2 * GIB, "free on GPU 0", with_context=True)
    on_gpu = a_fit(1400, free, max_batch=16, context=512, **PARTS)
    lines = shown(NextRunMemory(on_gpu))
    assert "┄" in lines[1]
    assert any("┄ context 512 MiB" in line for line in lines)
    assert lines[-2] == "predicted 1.37 GiB + context of 2.00 GiB"
    assert lines[-1].startswith("136 MiB left")
    assert (shown(NextRunMemory(on_gpu), SMALL))[0] == "1.37 GiB + context of 2.00 GiB"


async def test_the_panel_gives_it_the_room_it_needs_and_takes_it_back(home):
    async with running(home, ascii=True) as (app, pilot):
        await pilot.pause()
        bar = app.main.query_one(Predictions)
        for view in (NextRunMemory(FITS), NextRunMemory(reason="tracing the model…"), None):
            bar.show_predictions(view, None)
            await pilot.pause()
            lines = [] if view is None else memory_lines(view, PANEL[FULL], FULL[1])
            assert bar.region.height == len(lines)
            text = app.text
            assert text.isascii()
            assert ("# parameters 200 MiB" in text) == (view is not None and view.fit is not None)


@pytest.mark.parametrize("is_live", [True, False])
async def test_a_run_s_prediction_stands_beside_its_measurement(home, hold, is_live):
    predicted = {"predicted_bytes": 400 * MIB}
    directory = a_live_run(home, hold, **predicted) if is_live else a_run(home, **predicted)
    async with running(home, a_snapshot(directory, second=23)) as (app, pilot):
        words = "peak allocated 412 MiB (predicted 400 MiB, +3.0 %)"
        assert words in app.text
        assert words in await pilot.press("right"), "the next run is another one"


def text(share, width):
    return "".join(part for part, _ in bar(share, width))


def test_a_bar_knows_eighths_and_ascii():
    assert (text(0.5, 8), text(1 / 16, 8), text(None, 4), text(7.0, 4)) == ("████····", "▌·······", "····", "████")
    assert to_ascii(text(0.5, 8)) == "####...."
    assert text(0.5, 0) == ""


@given(st.none() | st.floats(allow_nan=False), st.integers(0, 50))
def test_a_bar_is_exactly_as_wide_as_asked(share, width):
    assert cell_len(text(share, width)) == cell_len(to_ascii(text(share, width))) == width


SPEED = PredictedSpeed(median=14.2, low=12.9, high=15.6, basis="3 runs")
PREDICTED = NextRunSpeed(SPEED)


def shown_speed(view, size=FULL):
    """The line as wide as the panel is on a screen of that size."""
    text = "".join(text for text, _ in speed_line(view, PANEL[size])).rstrip()
    assert len(text) <= PANEL[size], text
    return text


def test_a_prediction_is_shown_with_its_interval_and_the_change_of_turned_knobs():
    assert shown_speed(PREDICTED) == "predicted 14.2 samples/s (12.9 to 15.6)"
    assert shown_speed(PREDICTED, SMALL) == "14.2 samples/s (12.9 to 15.6)"
    faster = msgspec.structs.replace(PREDICTED, reference_samples_per_s=10.0)
    assert shown_speed(faster) == "predicted 14.2/s, +42.0 % from 10.0/s"
    assert shown_speed(faster, SMALL) == "14.2/s, +42.0 % from 10.0"
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
