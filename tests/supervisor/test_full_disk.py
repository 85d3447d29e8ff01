"""A disk that takes nothing more: the training goes on, and what can be said is said."""

from __future__ import annotations

import pytest

from trainfast_runner.run_directory.home import read_result

from .conftest import Run, until
from .test_real_worker import real

TRAINING = "begin(); train(5); wait_for('go'); say('finished')"


def test_full_disk_under_the_supervisors_own_files(run: Run) -> None:
    run.prepare(TRAINING)
    for name in ("telemetry.jsonl", "events.jsonl"):
        (run.directory / name).symlink_to("/dev/full")
    run.supervise()
    log = run.directory / "supervisor.log"
    for name in ("events.jsonl", "telemetry.jsonl"):
        until(lambda name=name: f"{name}: No space left on device" in log.read_text(), f"a word on {name}")
    (run.directory / "go").touch()
    result = run.end()
    assert (result.state, result.steps.measured) == ("finished", 3)


def test_full_disk_is_recorded_where_it_can_be(run: Run) -> None:
    run.prepare(TRAINING)
    (run.directory / "telemetry.jsonl").symlink_to("/dev/full")
    run.supervise()
    until(lambda: run.events("trouble"), "the trouble")
    (run.directory / "go").touch()
    assert run.end().state == "finished"
    assert [event.detail for event in run.events("trouble")] == ["telemetry.jsonl: No space left on device"]


def test_records_that_cannot_be_read_do_not_end_the_run(run: Run) -> None:
    run.prepare("wait_for('ready')\nsay = lambda *a, **k: None\nbegin(); train(5)")
    (run.directory / "worker.jsonl").mkdir()
    run.supervise()
    (run.directory / "ready").touch()
    result = run.end()
    assert result.state == "failed"
    assert result.steps.measured == 3
    assert result.unreadable_lines == 1
    assert run.events("trouble")
    assert read_result(run.directory) == result


def test_what_a_rank_could_not_write_is_said_with_the_result(run: Run) -> None:
    result = run.result_of("begin(); train(5); say('trouble', detail='steps.jsonl cannot be written'); say('finished')")
    assert result.state == "finished"
    assert result.troubles == ["rank 0: steps.jsonl cannot be written"]


@pytest.mark.long
def test_a_real_training_ends_well_though_no_step_can_be_written(run: Run) -> None:
    run.prepare("", **real(run, ranks=1, steps=8))
    (run.directory / "steps.jsonl").symlink_to("/dev/full")
    run.supervise()
    result = run.end()
    assert (result.state, result.steps.measured) == ("finished", 0)
    assert result.troubles == ["rank 0: steps.jsonl cannot be written: No space left on device; the training goes on"]
