"""Jobs of Slurm, by its own commands: the batch script of a run, `sbatch`, `squeue` and `scancel`.

Slurm only says that a job is pending, running or gone. How the run ended is in its lock and `result.json`.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainfast_runner.errors import UserError
from trainfast_runner.records.json_lines import text_of

SLURM_LOG = "slurm.log"
"""The output of the batch script, in the run directory."""
JOB_FILE = "slurm.job"
"""The file with the id of a run's job, in the run directory."""
SUBMIT_WITHIN_S, ANSWER_WITHIN_S = 120.0, 20.0
"""Chosen, not measured: sbatch itself retries for a while where the controller is busy; squeue and scancel answer
within Slurm's own MessageTimeout, by default 10 s."""
PENDING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
"""States of squeue(1) in which no process of the job has started; REQUEUED and those after it wait to start anew."""
ENDED_BY_SLURM = {
    "BOOT_FAIL": "a node did not start",
    "CANCELLED": "scancel",
    "DEADLINE": "deadline",
    "NODE_FAIL": "a node failed",
    "OUT_OF_MEMORY": "out of memory",
    "PREEMPTED": "pre-empted",
    "REVOKED": "another cluster runs it",
    "TIMEOUT": "time limit",
}
"""States of squeue(1) that Slurm gives to a job that it ended, in words; the other ends are the program's own."""
GONE = {*ENDED_BY_SLURM, "COMPLETED", "FAILED"}
NO_SUCH_JOB = ("Invalid job id", "already completing or completed")
"""Part of Slurm's error about a job that it has forgotten (after MinJobAge, by default 300 s) or that has ended."""
CANNOT_START = {"BadConstraints", "PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit"}
"""Reasons that make a job wait until an administrator changes a limit; whether sbatch refuses it at once is up to
EnforcePartLimits of slurm.conf(5)."""
NOT_ONE_JOB = {
    "-a": "--array",
    "-W": "--wait",
    "-n": "--ntasks",
    **{name: name for name in ("--array", "--wait", "--ntasks", "--ntasks-per-node", "--wrap", "--test-only")},
}
"""Options of sbatch(1) under which a submission is not one job with one supervisor a node."""


@dataclass(frozen=True, slots=True)
class JobState:
    """A job as squeue(1) shows it."""

    stage: Literal["pending", "running", "gone", "unknown"]
    """`running` until the last process has ended; `unknown` while Slurm does not answer, which is not `gone`."""
    state: str = ""
    """Slurm's own word, such as RUNNING or TIMEOUT; empty if Slurm did not answer or has forgotten the job."""
    reason: str = ""
    """Why it waits or ended, in Slurm's word, such as Resources, or why its state is unknown; else empty."""


def node_count(options: Sequence[str]) -> int:
    """Return the nodes that options of sbatch(1) ask for, 1 by default. Raises UserError unless it is one number."""
    nodes = "1"
    for option, following in zip(options, [*options[1:], ""], strict=False):
        if found := re.fullmatch(r"(?:-N|--nodes(?==|$))=?(.*)", option, re.DOTALL):
            nodes = found[1] or following
    if not (nodes.isascii() and nodes.isdigit() and int(nodes)):
        raise UserError(
            f"the number of nodes is {nodes!r}, not one whole number", where="--slurm", allowed=["1 or more"]
        )
    return int(nodes)


def batch_script(nodes: int, argv: Sequence[str], directory: Path) -> str:
    """Return the script that runs `argv` once on each node; its node number is SLURM_NODEID in the environment.

    A job that Slurm ends is not put back into the queue: a second run cannot use the same directory.
    """
    # sbatch(1), "filename pattern": %% is a percent sign, and a backslash stops the replacement in the whole name.
    output = str(directory / SLURM_LOG).replace("%", "%%")
    return "\n".join(
        (
            "#!/bin/sh",
            f"#SBATCH --nodes={nodes} --ntasks-per-node=1 --no-requeue --job-name={shlex.quote(directory.name)}",
            f"#SBATCH --output={shlex.quote(output)}",
            # From 22.05 on, srun no longer takes the processors of a task from sbatch's option.
            '[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',
            f"exec srun --kill-on-bad-exit=1 --wait=60 {shlex.join(argv)}",
            "",
        )
    )


def submit(script: str, options: Sequence[str]) -> str:
    """Submit a batch script with more options of sbatch(1); return the job's id, for `job_state` and `cancel`.

    Raises UserError when sbatch is not on PATH, refuses or does not answer, and when Slurm cannot start the job.
    """
    for option in options:
        name = option.partition("=")[0] if option.startswith("--") else option[:2]
        if name in NOT_ONE_JOB:
            raise UserError(f"{NOT_ONE_JOB[name]} does not go with a run, which is one job", where="--slurm")
    try:
        done = _ask(SUBMIT_WITHIN_S, "sbatch", "--parsable", *options, text=script)
    except NoAnswer as error:
        raise UserError(str(error), where="--slurm") from None
    if done.returncode or not (job_id := done.stdout.strip()):
        raise UserError(f"Slurm refused the job: {_last_line(done)}", where="--slurm")
    if (reason := job_state(job_id).reason) in CANNOT_START:
        cancel(job_id)
        raise UserError(f"Slurm cannot start the job: {reason}", where="--slurm")
    return job_id


def job_state(job_id: str) -> JobState:
    """Return the job's state; never raises: its stage is `unknown` while Slurm does not answer."""
    try:
        done = _ask(ANSWER_WITHIN_S, "squeue", "-h", "-t", "all", "-o", "%T %r", "-j", *_of(job_id))
    except NoAnswer as error:
        return JobState("unknown", reason=str(error))
    if done.returncode and not any(words in done.stderr for words in NO_SUCH_JOB):
        return JobState("unknown", reason=_last_line(done))
    # A cluster's name makes squeue begin with a line "CLUSTER: name".
    lines = [line for line in done.stdout.splitlines() if line.strip() and not line.startswith("CLUSTER:")]
    if not lines:
        return JobState("gone")
    state, _, reason = lines[-1].strip().partition(" ")
    reason = "" if reason == "None" else reason
    return JobState("pending" if state in PENDING else "gone" if state in GONE else "running", state, reason)


def job_of(directory: Path) -> str | None:
    """Return the id of the job that the run is; None for a run that Slurm has not placed."""
    return text_of(directory / JOB_FILE).strip() or None


def cancel(job_id: str) -> None:
    """End the job, which may have ended already. Raises UserError with exit code 4 when Slurm does not do it."""
    try:
        done = _ask(ANSWER_WITHIN_S, "scancel", *_of(job_id))
        failed = _last_line(done) if done.returncode else ""
    except NoAnswer as error:
        failed = str(error)
    if failed and not any(words in failed for words in NO_SUCH_JOB):
        raise UserError(f"job {job_id} was not cancelled: {failed}", exit_code=4)


def end_reason(job: JobState) -> str | None:
    """Say why Slurm ended the job; None when it has not ended, or ended by itself."""
    words = ENDED_BY_SLURM.get(job.state)
    return words and f"Slurm ended it: {words}"


def _of(job_id: str) -> list[str]:
    """Return the arguments that name a job: sbatch prints `ID;CLUSTER` for a job of another cluster."""
    number, _, cluster = job_id.partition(";")
    return [number, *(["-M", cluster] if cluster else [])]


class NoAnswer(Exception):
    """A command of Slurm that is absent or hangs, in words."""


def _ask(within_s: float, *command: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands. Raises NoAnswer."""
    try:
        return subprocess.run(command, input=text, capture_output=True, text=True, errors="replace", timeout=within_s)
    except FileNotFoundError:
        raise NoAnswer(f"{command[0]} is not on PATH: start this where Slurm's commands are") from None
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{command[0]} did not answer within {within_s:.0f} s; squeue shows the jobs") from None


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line that a command of Slurm wrote about its failure, without its name and `error:`."""
    lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("Try ")]
    last = re.sub(r"^\w+: (error: )?", "", lines[-1].strip()) if lines else f"exit code {done.returncode}"
    return last.removeprefix("Batch job submission failed: ")
