"""The live rate: one function for the screen and for `run`, `attach` and `runs show`, over measured steps alone."""

from dataclasses import replace

import msgspec
import pytest
from recorded import a_step, with_start, write_lines
from still import a_live_run, has

from trainfast_runner.results.summary import _losses
from trainfast_runner.running.follower import Follower
from trainfast_tui.cli.progress import live_record, status_line
from trainfast_tui.live.figures import first_and_last_loss, run_figures
from trainfast_tui.panels.step_panel import StepPanel


def step(number):
    """Three slow warm-up steps of 4 samples/s, then 16 samples/s."""
    return msgspec.structs.replace(a_step(number), step_ms=2000.0 if number <= 3 else 500.0)


@pytest.fixture
def live(home, hold):
    """A live run of two ranks that have written so many steps each."""

    def write(first_rank, second_rank):
        ddp = {"strategy": "ddp", "steps": 40}
        directory = with_start(a_live_run(home, hold, steps=0, knobs=ddp), world_size=2)
        write_lines(directory / "steps.jsonl", [step(n) for n in range(1, first_rank + 1)])
        write_lines(directory / "steps.rank1.jsonl", [step(n) for n in range(1, second_rank + 1)])
        return Follower(directory).poll()

    return write


def shown(snapshot, width=120):
    """The screen's lines about the run."""
    panel = StepPanel()
    panel._run = snapshot
    return "\n".join("".join(text for text, _ in line) for line in panel.lines(width, 5))


@pytest.mark.parametrize("behind", [0, 1, 2])
def test_the_command_line_leaves_the_warm_up_out_of_the_rate_as_the_screen_does(live, behind):
    snapshot = live(6, 6 - behind)
    assert run_figures(snapshot).samples_per_s == pytest.approx(32.0), "of both ranks, without the slow warm-up"
    assert live_record(snapshot)["samples_per_s"] == pytest.approx(32.0)
    has(status_line(snapshot), "  32.0 samples/s  500 ms  ", "17 s left")
    assert shown(snapshot).count("32.0 samples/s") == 1
    assert "17 s left" in shown(snapshot)


def test_while_it_warms_up_there_is_no_rate(live):
    snapshot = live(3, 3)
    assert live_record(snapshot)["samples_per_s"] is None
    line = status_line(snapshot)
    assert "warming up" in line
    assert "samples/s" not in line
    assert "warming up" in shown(snapshot)


def test_figures_of_a_warm_up_that_was_stopped_are_marked(live):
    ended = replace(live(3, 3), state="stopped")
    assert "of the warm-up: no step was measured" in shown(ended)
    assert "8.00 samples/s" in shown(ended, 47)
    assert "of warm-up" in shown(ended, 47)


@pytest.mark.parametrize("logged_each", [1, 10])
def test_the_last_loss_is_the_mean_of_the_last_logged_ones_as_in_the_result(live, logged_each):
    steps = tuple(msgspec.structs.replace(step(n), loss=None if n % logged_each else n / 10) for n in range(1, 100))
    snapshot = replace(live(6, 6), steps=steps)
    assert first_and_last_loss(snapshot)[1] == pytest.approx(9.7 if logged_each == 1 else 7.0)
    ended = _losses(list(steps), 0)
    assert first_and_last_loss(snapshot)[1] == ended.last
    not_finite = msgspec.structs.replace(step(100), loss=None, loss_not_finite=True)
    assert first_and_last_loss(replace(snapshot, steps=(*steps, not_finite)))[1] is None
