"""The jobs of a real Slurm with two nodes, which `make test-slurm` starts."""

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurm.cluster import free_ports
from trainfast_runner.errors import UserError
from trainfast_runner.running import slurm
from trainfast_runner.running.slurm import SLURM_LOG, JobState, batch_script, cancel, end_reason, job_state, submit

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif("TRAINFAST_TEST_SLURM" not in os.environ, reason="make test-slurm starts the Slurm of these"),
]
PATIENCE_S = 60.0
TIME_LIMIT_S = 180.0
"""A time limit is at least a minute, and Slurm looks every half minute."""


def wait_for(job_id, arrived, within_s=PATIENCE_S):
    """The first state of the job of which `arrived` is true."""
    deadline_s = time.monotonic() + within_s
    while not arrived(state := job_state(job_id)):
        assert time.monotonic() < deadline_s, state
        time.sleep(0.1)
    return state


def end_of(job_id, within_s=PATIENCE_S):
    """The state of the job once it is gone."""
    return wait_for(job_id, lambda job: job.stage == "gone", within_s)


def is_running(job):
    return job.stage == "running"


def start(folder, program, *options):
    """The id of a job that runs a line of shell on each node, once it has been queued."""
    return submit(batch_script(slurm.node_count(options), ["sh", "-c", program], folder), options)


def refusal(folder, *options):
    """The line that refuses a job with these options."""
    with pytest.raises(UserError) as refused:
        start(folder, "true", *options)
    assert refused.value.exit_code == 2
    assert "\n" not in refused.value.line()
    assert not subprocess.run(["squeue", "-h"], capture_output=True).stdout, "nothing is left in the queue"
    return refused.value.line()


def has_process(word):
    """True if a process of this machine has the word in its command line."""
    return subprocess.run(["pgrep", "-f", word], capture_output=True).returncode == 0


def test_a_job_of_two_nodes_runs_once_on_each(tmp_path):
    folder = tmp_path / "a 'b' \"c\" 100%j $HOME"
    folder.mkdir()
    job_id = submit(batch_script(2, ["sh", "-c", 'echo "$SLURM_NODEID $1"', "sh", "it's $2"], folder), [])
    assert end_of(job_id) == JobState("gone", "COMPLETED")
    assert end_reason(job_state(job_id)) is None
    assert sorted((folder / SLURM_LOG).read_text().splitlines()) == ["0 it's $2", "1 it's $2"]


def test_torchrun_trains_on_two_nodes(tmp_path):
    (tmp_path / "ddp.py").write_text(TRAINING)
    torchrun = shlex.join([sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"])
    [port] = free_ports(1)
    is_host = "$([ $SLURM_NODEID = 0 ] && echo true || echo false)"
    command = (
        f"exec {torchrun} --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{port} --rdzv-id=$SLURM_JOB_ID"
        f" --rdzv-conf=is_host={is_host} --local-addr=127.0.0.1 {tmp_path}/ddp.py"
    )
    job_id = start(tmp_path, command, "--nodes=2")
    state, log = end_of(job_id, 120.0), (tmp_path / SLURM_LOG).read_text()
    assert state == JobState("gone", "COMPLETED"), log
    losses = sorted(line for line in log.splitlines() if line.startswith("rank"))
    assert [line.split()[:4] for line in losses] == [["rank", "0", "of", "2"], ["rank", "1", "of", "2"]]
    assert losses[0].split()[-1] == losses[1].split()[-1]


TRAINING = """\
import os

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

distributed.init_process_group("gloo")
torch.manual_seed(0)
torch.set_num_threads(1)
model = DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(distributed.get_rank())
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
weights = sum(parameter.sum().item() for parameter in model.parameters())
print(f"rank {distributed.get_rank()} of {distributed.get_world_size()} weights {weights:.6f}", flush=True)
os._exit(0)  # as a training process of ours ends: gloo's threads sometimes abort one that leaves its group
"""


def test_a_node_that_fails_ends_the_other(tmp_path):
    job_id = start(tmp_path, "[ $SLURM_NODEID = 0 ] && exit 3; exec sleep 4011", "-N2")
    # On busy cores node 0 may fail before srun has node 1's task to kill: then its --wait=60 ends the job.
    state = end_of(job_id, 100.0)
    assert (state.stage, state.state, end_reason(state)) == ("gone", "FAILED", None)
    assert not has_process("sleep 4011")


def test_a_queued_job_says_why_it_waits_and_then_runs(tmp_path):
    first = start(tmp_path, "exec sleep 4012", "-N", "2", "--exclusive")
    wait_for(first, is_running)
    second = start(tmp_path, "exec true", "--nodes", "2")
    waiting = wait_for(second, lambda job: job.reason not in ("", "Priority"))
    assert waiting == JobState("pending", "PENDING", "Resources")
    assert end_reason(waiting) is None
    cancel(first)
    assert end_of(second) == JobState("gone", "COMPLETED")


def test_scancel_from_outside_ends_every_process(tmp_path):
    job_id = start(tmp_path, "sleep 4013 & exec sleep 4013", "-N2")
    wait_for(job_id, lambda job: has_process("sleep 4013"))
    assert is_running(job_state(job_id))
    subprocess.run(["scancel", job_id], check=True)
    state = end_of(job_id)
    assert (state.state, end_reason(state)) == ("CANCELLED", "Slurm ended it: scancel")
    assert not has_process("sleep 4013")
    cancel(job_id)  # it has ended, which is no error


def test_a_pending_job_can_be_cancelled(tmp_path):
    job_id = start(tmp_path, "true", "--hold")
    assert job_state(job_id) == JobState("pending", "PENDING", "JobHeldUser")
    cancel(job_id)
    assert end_of(job_id).state == "CANCELLED"


def test_pre_emption_ends_the_job_for_good(tmp_path):
    job_id = start(tmp_path, "exec sleep 4014", "-N2", "--exclusive")
    wait_for(job_id, is_running)
    urgent = start(tmp_path, "true", "--partition=urgent", "-N2", "--exclusive")
    state = end_of(job_id)
    assert (state.state, end_reason(state)) == ("PREEMPTED", "Slurm ended it: pre-empted")
    assert end_of(urgent).state == "COMPLETED"


def test_a_time_limit_is_named(tmp_path):
    job_id = start(tmp_path, "exec sleep 4015", "--time=0:01")
    state = end_of(job_id, TIME_LIMIT_S)
    assert (state.state, end_reason(state)) == ("TIMEOUT", "Slurm ended it: time limit")
    assert not has_process("sleep 4015")


def test_the_processors_of_a_task_reach_the_run(tmp_path):
    end_of(start(tmp_path, "echo $SLURM_CPUS_PER_TASK", "-N2", "--cpus-per-task=2"))
    assert (tmp_path / SLURM_LOG).read_text().split() == ["2", "2"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--partition=nope"], "Slurm refused the job: Invalid partition name specified"),
        (["-N3"], "Slurm cannot start the job: PartitionConfig"),
        (["--cpus-per-task=99"], "Slurm cannot start the job: PartitionConfig"),
        (["--colour=red"], "Slurm refused the job: unrecognized option '--colour=red'"),
        (["--time=soon"], "Slurm refused the job: Invalid --time specification"),
    ],
)
def test_a_refusal_is_one_line_of_slurms_own(tmp_path, options, said):
    assert said in refusal(tmp_path, *options)


def test_a_job_that_slurm_has_forgotten_is_gone():
    assert job_state("4000000") == JobState("gone")
    assert end_reason(job_state("4000000")) is None
    cancel("4000000")


def test_a_controller_that_does_not_answer_says_nothing_of_the_job(tmp_path, monkeypatch):
    job_id = start(tmp_path, "true", "--hold")
    configuration = Path(os.environ["SLURM_CONF"]).read_text()
    lines = ["SlurmctldPort=1" if line.startswith("SlurmctldPort") else line for line in configuration.splitlines()]
    (tmp_path / "slurm.conf").write_text("\n".join([*lines, "MessageTimeout=2", ""]))
    with monkeypatch.context() as away:
        away.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
        lost = job_state(job_id)
        assert (lost.stage, lost.state) == ("unknown", "")
        assert "Unable to contact slurm controller" in lost.reason
        with pytest.raises(UserError, match=f"job {job_id} was not cancelled: .*Unable to contact"):
            cancel(job_id)
    assert job_state(job_id).stage == "pending"
    cancel(job_id)
