"""How a run ends, as its result says it."""

import os
import stat
import time

import pytest

from trainfast_runner.records.run_file import ScriptAsked
from trainfast_runner.running.present_state import run_state
from trainfast_runner.running.supervisor import SupervisorBounds


def test_finished(run, ended_clean):
    began_s = time.monotonic()
    result = run.result_of(
        """
        print("hello from the training", flush=True)
        print(os.getsid(0) == os.getpid(), os.path.samefile("/dev/null", "/dev/fd/0"), flush=True)
        begin(); train(steps=10); say("finished")
        """
    )
    assert (result.state, result.reason) == ("finished", "took all 10 steps")
    assert (result.steps.measured, result.steps.warmup) == (8, 2)
    assert result.throughput.samples_per_s.median == pytest.approx(400)
    assert (result.loss.first, result.loss.last) == (7.0, 2.0)
    assert result.error is None
    assert 0 < result.seconds < time.monotonic() - began_s
    assert [event.state for event in run.events("state")] == ["starting", "running", "finished"]
    output = run.directory / "output.log"
    assert output.read_text() == "hello from the training\nTrue True\n"
    assert stat.S_IMODE(output.stat().st_mode) == 0o600
    assert (run.directory / "telemetry.jsonl").read_text().count('"host"') >= 1
    assert not run_state(run.directory).supervised
    ended_clean(run)


ENDS = {
    "an exception in training": (
        "failed", "ValueError: bad value (step 4, phase backward)",
        "begin(); train(3); fail('ValueError', 'bad value\\nmore', phase='backward', step=4); os._exit(1)"),
    "a Python without torch": (
        "failed_to_start", "ModuleNotFoundError: No module named 'torch' (phase import);"
        " install it with: /opt/env/bin/python -m pip install torch transformers",
        "begin(); fail('ModuleNotFoundError', \"No module named 'torch'\", phase='import'); os._exit(1)"),
    "an out-of-memory record": (
        "oom", "DefaultCPUAllocator: can't allocate memory: you tried to allocate 2147483648 bytes."
        " (step 3, phase forward)",
        "begin(); train(2); fail('RuntimeError', \"[enforce fail at alloc_cpu.cpp:124] err == 0."
        " DefaultCPUAllocator: can't allocate memory: you tried to allocate 2147483648 bytes.\","
        " phase='forward', step=3, is_oom=True); os._exit(1)"),
    "memory ran out where nothing could be recorded": (
        "oom", "std::bad_alloc (after step 2, phase train)",
        "begin(); train(2); print('terminate called', 'std::bad_alloc', sep='\\n'); os.abort()"),
    "input the worker refused": (
        "failed_to_start", "no field hiden",
        "begin(); say('invalid', message='no field hiden', key='model.hiden', allowed=['hidden'],"
        " nearest='model.hidden'); os._exit(2)"),
    "status 0 without the worker's word": (
        "failed", "the training exited with status 0, but rank 0 never recorded that it finished",
        "begin(); train(3)"),
    "no record at all": (
        "failed_to_start", "the training exited with status 1: python: No module named torch.distributed.run",
        "print('python: No module named torch.distributed.run'); sys.exit(1)"),
    "finished, then another status": (
        "failed", "the training exited with status 7 (after step 3, phase train)",
        "begin(); train(3); say('finished'); sys.exit(7)"),
    "something else ran than was asked": (
        "failed", "precision=fp32 (param_dtype): asked for float32, but rank 0 ran bfloat16",
        "begin(); train(3, param_dtype='bfloat16'); say('finished')"),
    "a signal out of nowhere": (
        "killed", "the training process died of SIGSEGV, which trainfast-tui did not send (after step 3, phase train)",
        "begin(); train(3); os.kill(os.getpid(), signal.SIGSEGV)"),
    "killed from outside": (
        "killed", "the training process died of SIGKILL, which trainfast-tui did not send (after step 3, phase train)",
        "begin(); train(3); os.kill(os.getpid(), signal.SIGKILL)"),
}  # fmt: skip


@pytest.mark.parametrize(("state", "reason", "body"), ENDS.values(), ids=ENDS)
def test_end(run, ended_clean, body, state, reason):
    result = run.result_of(body)
    assert (result.state, result.reason) == (state, reason)
    assert result.error is not None
    if "say('invalid'" in body:
        error = result.error
        assert (error.key, error.allowed, error.nearest) == ("model.hiden", ["hidden"], "model.hidden")
    ended_clean(run)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"argv": ["/no/such/python", "x"]}, "cannot start /no/such/python: No such file or directory"),
        ({"argv": ["/etc/passwd"]}, "cannot start /etc/passwd: Permission denied"),
        ({"cwd": "/no/such/directory"}, "cannot start /no/such/directory: No such file or directory"),
        ({"argv": []}, "cannot start an empty command: list index out of range"),
    ],
)
def test_command_that_cannot_be_executed(run, fields, reason):
    result = run.result_of("", **fields)
    assert (result.state, result.reason) == ("failed_to_start", reason)


def test_a_place_in_somebody_elses_job_is_not_inherited(run):
    """As in a shell inside a torchrun job: rank 3 of 8 would wait for the others for ever."""
    job = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    more = {"PET_NNODES": "2", "TORCHELASTIC_ERROR_FILE": "/tmp/x", "OMPI_COMM_WORLD_SIZE": "8", "OF_THE_USER": "1"}
    names = [*job, *more, "OF_THE_LAUNCH"]
    run.prepare(
        f"print([name for name in {names} if name in os.environ]); begin(); train(3); say('finished')",
        env={"OF_THE_LAUNCH": "1"},
    )
    run.supervise(env={**os.environ, **job, **more})
    assert run.end().state == "finished"
    assert (run.directory / "output.log").read_text() == "['OF_THE_USER', 'OF_THE_LAUNCH']\n"


def test_lines_that_cannot_be_read_are_counted(run):
    result = run.result_of(
        """
        begin(); train(4)
        with open(f"{RUN_DIR}/steps.jsonl", "ab") as file:
            file.write(b"\\xff\\xfe not json\\n{\\"step\\": \\"three\\"}\\n")
        train(4, first=5); say("finished"); say("a kind of the future", novelty=[1])
        with open(f"{RUN_DIR}/steps.jsonl", "ab") as file:
            file.write(b'{"t_ns": 5, "st')
        """
    )
    assert (result.state, result.unreadable_lines, result.steps.measured) == ("finished", 2, 6)


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
    assert notice.detail.startswith("no optimizer step seen in 0.1 s: the script may still load or compile; ")
    for way in ("an optimizer of torch.optim", "trainfast_door.step()` after each step", "--steps-from-log REGEX"):
        assert way in notice.detail
    assert result.state == "finished"
    assert "--steps-from-log REGEX" in result.reason
