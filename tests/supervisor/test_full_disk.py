"""A disk that takes nothing more: the training goes on, and what can be said is said."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import trainfast_runner
from cli.command import until
from trainfast_runner.records.run_directory import read_result
from trainfast_runner.records.run_file import ScriptAsked

from .test_real_worker import real

TRAINING = "begin(); train(5); wait_for('go'); say('finished')"
OFFLOADED = "begin(); train(5, wrapper='DeepSpeedEngine'); say('finished')"
"""A training of zero3-offload."""


def test_full_disk_under_the_supervisors_own_files(run):
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


def test_full_disk_is_recorded_where_it_can_be(run):
    run.prepare(TRAINING)
    (run.directory / "telemetry.jsonl").symlink_to("/dev/full")
    run.supervise()
    until(lambda: run.events("trouble"), "the trouble")
    (run.directory / "go").touch()
    assert run.end().state == "finished"
    assert [event.detail for event in run.events("trouble")] == ["telemetry.jsonl: No space left on device"]


def test_ranks_are_followed_while_no_step_of_the_output_can_be_written(run):
    asked = ScriptAsked(command=["python", "train.py"], argv=[], steps_from_log="^took a step")
    run.prepare(
        "print('took a step', flush=True); begin(); say('phase', phase='train'); wait_for('go'); say('finished')",
        script=asked,
    )
    (run.directory / "steps.jsonl").symlink_to("/dev/full")
    run.supervise()
    run.in_training()
    until(lambda: run.events("trouble"), "the trouble")
    (run.directory / "go").touch()
    assert run.end().state == "finished"
    assert [one.detail for one in run.events("trouble")] == ["steps.jsonl cannot be written: No space left on device"]


def test_records_that_cannot_be_read_do_not_end_the_run(run):
    run.prepare("wait_for('ready')\nsay = lambda *a, **k: None\nbegin(); train(5)")
    (run.directory / "worker.jsonl").mkdir()
    run.supervise()
    (run.directory / "ready").touch()
    result = run.end()
    assert (result.state, result.steps.measured, result.unreadable_lines) == ("failed", 3, 1)
    assert run.events("trouble")
    assert read_result(run.directory) == result


def test_what_a_rank_could_not_write_is_noted_with_the_result(run):
    result = run.result_of("begin(); train(5); say('trouble', detail='steps.jsonl cannot be written'); say('finished')")
    assert (result.state, result.troubles) == ("finished", ["rank 0: steps.jsonl cannot be written"])


WITHIN_A_SMALL_DISK = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
CAN_MOUNT = subprocess.run([*WITHIN_A_SMALL_DISK, "mount -t tmpfs tmpfs /mnt"], capture_output=True).returncode == 0


@pytest.mark.skipif(not CAN_MOUNT, reason="this user may not mount a file system of their own")
def test_a_disk_that_fills_under_offload_path_is_the_reason(run, tmp_path):
    """As with DeepSpeed: the write fails without a word, and the rank aborts when it reads the states back."""
    disk = tmp_path / "disk"
    disk.mkdir()
    run.prepare(
        f"""
        sys.path.insert(0, {str(Path(trainfast_runner.__file__).parents[1])!r})
        from pathlib import Path
        from trainfast_runner.worker.shared.host import states_folder
        begin()
        folder = states_folder({str(disk)!r}, Path({str(run.directory)!r}))
        folder.mkdir()
        with open(folder / "states", "wb", buffering=0) as file:
            train(3)
            try:
                while True:
                    file.write(bytes(1 << 20))
            except OSError:
                os.abort()
        """,
        knobs={"strategy": "zero3-offload", "offload_path": str(disk)},
    )
    within = f"mount -t tmpfs -o size=32m tmpfs {disk} && {sys.executable} -P -m trainfast_runner.running.supervisor"
    subprocess.run([*WITHIN_A_SMALL_DISK, f"{within} {run.directory} && ls {disk} > {tmp_path}/left"], check=True)
    result = read_result(run.directory)
    assert result is not None
    assert result.reason.startswith(f"offload_path={disk} is full (0 MiB free): the training process died of SIGABRT")
    assert (tmp_path / "left").read_text() == ""


def test_an_offload_path_that_never_answers_does_not_keep_the_verdict_back(run, tmp_path):
    """As on an NFS mount whose server is gone."""
    run.waits = {"supervisor.DISK_ANSWERS_S": 0.3}
    (tmp_path / "sitecustomize.py").write_text(
        "import os, threading\nright = os.statvfs\n"
        f"os.statvfs = lambda path: threading.Event().wait() if str(path) == '{tmp_path}/disk' else right(path)\n"
    )
    knobs = {"strategy": "zero3-offload", "offload_path": f"{tmp_path}/disk"}
    run.prepare(OFFLOADED, knobs=knobs)
    run.supervise(env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert run.end().state == "finished"


@pytest.mark.long
def test_a_real_training_ends_well_though_no_step_can_be_written(run):
    run.prepare("", **real(run, ranks=1, steps=8))
    (run.directory / "steps.jsonl").symlink_to("/dev/full")
    run.supervise()
    result = run.end()
    assert (result.state, result.steps.measured) == ("finished", 0)
    assert "rank 0: steps.jsonl cannot be written: No space left on device; the training goes on" in result.troubles
