"""A process that outlives SIGKILL: the run ends as lost, unless its ranks had finished; it is named in either case."""

import contextlib
import ctypes
import os
import signal

import pytest

from cli.command import until
from trainfast_runner.records.run_directory import RunRecords, is_unfinished
from trainfast_runner.records.run_file import ClockAnchor, RunFile
from trainfast_runner.records.run_lines import TrainingEnd, UnendedProcess
from trainfast_runner.records.worker_lines import StartedLine
from trainfast_runner.running.settling import unended_reason
from trainfast_runner.running.supervisor import SupervisorBounds

PTRACE_SEIZE, PR_SET_PTRACER, WALL = 0x4206, 0x59616D61, 0x40000000
TRACED = f"import ctypes; ctypes.CDLL(None).prctl({PR_SET_PTRACER}, ctypes.c_ulong(-1), 0, 0, 0)\n"
SOON = SupervisorBounds(grace_s=0.1, unkillable_s=0.5)


@contextlib.contextmanager
def held_in_the_kernel(pid):
    """No parent can collect `pid` meanwhile: the kernel keeps it for its tracer, as it keeps one in state D."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(PTRACE_SEIZE, pid, None, None) != 0:
        pytest.skip(f"this user may not trace: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        os.waitpid(pid, WALL)


def test_a_process_that_outlives_sigkill_ends_the_run_as_lost(run):
    run.train(TRACED + "begin(); train(3); wait_for_ever()", SOON)
    pid = run.child_pid()
    with held_in_the_kernel(pid):
        run.signal(signal.SIGTERM)
        result = run.end()
    assert result.state == "lost"
    assert result.reason == (
        f"pid {pid} (rank 0) is in state Z (ended, but its tracer keeps it) and did not end within 0.5 s of SIGKILL:"
        " 3 steps recorded; no end was recorded"
    )
    assert result.steps.measured == 1
    assert not is_unfinished(run.directory)


def test_a_rank_that_outlives_its_launcher_and_sigkill_ends_the_run_as_lost(run):
    """The launcher fails at once; its rank is what cannot be ended."""
    run.train(TRACED + "spawn_rank(0, 1, lambda: (train(3), wait_for_ever())); wait_for('go'); sys.exit(1)", SOON)
    (rank,) = run.pids()
    with held_in_the_kernel(rank):
        (run.directory / "go").touch()
        result = run.end()
    assert result.state == "lost"
    assert result.reason.startswith(f"pid {rank} (rank 0) is in state Z")
    until(lambda: not os.path.exists(f"/proc/{rank}"), "the rank to be collected")


@pytest.mark.parametrize("waits", [False, True], ids=["the-rank-exits", "the-rank-waits-for-it"])
def test_a_run_whose_ranks_finished_stays_finished_when_a_data_process_cannot_be_ended(run, waits):
    run.start(
        f"{TRACED}begin(); train(3)\npid = os.fork()\n"
        + f"if pid == 0:\n    {TRACED}    wait_for_ever()\n"
        + "say('data', detail=str(pid)); wait_for('go'); say('finished')\n"
        + ("signal.signal(signal.SIGTERM, lambda *_: None)\nos.waitpid(pid, 0)" if waits else ""),
        SOON,
    )
    pid = int(until(lambda: run.worker("data"), "the data process")[0]["detail"])
    with held_in_the_kernel(pid):
        (run.directory / "go").touch()
        if waits:
            until(lambda: run.worker("finished"), "the rank's last word")
            os.kill(run.child_pid(), signal.SIGKILL)
        result = run.end()
    assert (result.state, result.reason) == ("finished", "took all 3 steps")
    (trouble,) = result.troubles
    assert trouble.startswith(f"pid {pid} (")
    assert trouble.endswith("is in state Z (ended, but its tracer keeps it) and did not end within 0.5 s of SIGKILL")
    until(lambda: not os.path.exists(f"/proc/{pid}"), "the data process to be collected")


def test_the_reason_names_pid_state_and_gpu():
    run = RunFile(
        run_id="r", preset="p", clock=ClockAnchor(monotonic_ns=0, wall_ns=0), world_size=2, device="cuda",
        device_uuids=["GPU-a", "GPU-b"],
    )  # fmt: skip
    records = RunRecords(run=run, worker_lines={rank: [StartedLine(t_ns=1, pid=100 + rank)] for rank in range(2)})
    stuck = [UnendedProcess(*one, "D") for one in ((101, "python"), (100, "python"), (7, "pt_data_worker"))]
    assert unended_reason(TrainingEnd(unended=stuck, unkillable_s=60.0), records) == (
        "pid 101 (rank 1) is in state D (uninterruptible sleep);"
        " pid 100 (rank 0) is in state D (uninterruptible sleep);"
        " pid 7 (pt_data_worker) is in state D (uninterruptible sleep)"
        " and did not end within 60 s of SIGKILL"
    )
