"""A script that takes no step that the hooks see: its person is told how to make them seen."""

import subprocess
import sys
import time
from contextlib import contextmanager

from cli.command import until
from trainfast_runner.records.capped_file import CappedFile
from trainfast_runner.records.run_directory import read_run_file
from trainfast_runner.records.run_file import ScriptAsked
from trainfast_runner.running.supervision.ranks import ScriptWatch
from trainfast_runner.running.supervision.supervisor import SupervisorBounds


def test_a_live_run_of_a_script_without_steps_lists_the_three_ways(run):
    result = run.result_of(
        """
        while "no_step" not in open("events.jsonl").read():
            time.sleep(0.02)
        """,
        SupervisorBounds(no_step_s=0.1),
        script=ScriptAsked(command=["python", "train.py"], argv=["python", "train.py"]),
    )
    [notice] = run.events("no_step")
    assert notice.detail.startswith("no optimizer step seen in 0.1 s: ")
    for way in ("an optimizer of torch.optim", "trainfast_door.step()` after each step", "--steps-from-log REGEX"):
        assert way in notice.detail
    assert result.state == "finished"
    assert "--steps-from-log REGEX" in result.reason


@contextmanager
def child(body):
    """A process below this one that has done `body`, and stays until the end."""
    code = f"import sys, time\n{body}\nprint(flush=True)\nsys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", code], **pipes) as process:
        process.stdout.readline()
        yield


def watch_of(run, notices):
    """The watch over a script that has just been started, and runs below this process."""
    run.prepare("", script=ScriptAsked(command=["python", "train.py"], argv=["python", "train.py"]))
    asked = read_run_file(run.directory)
    output = CappedFile(run.directory / "output.log")
    return ScriptWatch(asked, run.directory, output, notices.append, no_step_s=0.05)


def polled(watch, notices):
    """The notices after another poll."""
    watch.poll(in_training=False)
    return notices


def test_script_that_compiles_is_shown_as_compiling_and_shown_the_ways_afterwards(run):
    notices = []
    watch = watch_of(run, notices)
    with child("open('/proc/self/comm', 'w').write('nvcc')"):
        until(lambda: polled(watch, notices), "a notice")
        again = time.monotonic() + 0.2
        until(lambda: polled(watch, notices) and time.monotonic() > again, "later polls")
        assert notices == ["no optimizer step seen in 0.05 s: the script is compiling (nvcc)"]
    until(lambda: polled(watch, notices)[1:], "the ways to report steps")
    assert "--steps-from-log REGEX" in notices[1]


def test_script_that_computes_without_a_step_may_still_load_or_compile(run):
    notices = []
    with child("while time.process_time() < 0.5:\n    pass"):
        watch = watch_of(run, notices)
        until(lambda: polled(watch, notices), "a notice")
    assert "s of processor time, so it may still load or compile" in notices[0]
    assert "--steps-from-log REGEX" in notices[0]
