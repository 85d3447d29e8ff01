"""A run with a stand-in training under the real supervisor: real processes, real signals, real files."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cli.command import until
from trainfast_runner.machine.processes import boot_id
from trainfast_runner.records.json_lines import read_all
from trainfast_runner.records.run_directory import RESULT_FILE, is_alive, read_result, shared_lock
from trainfast_runner.records.run_file import ClockAnchor, RunFile
from trainfast_runner.records.run_lines import Event
from trainfast_runner.running.present_state import run_state, running_ranks
from trainfast_runner.running.supervisor import SupervisorBounds

PRELUDE = (Path(__file__).parent / "stand_in_training.py").read_text()
PATIENCE_S = 120.0


class Run:
    """One run directory and the supervisor over it."""

    def __init__(self, directory):
        self.directory = directory
        self.supervisor = None
        self.waits = {}
        """The supervisor's constants that are shorter in this run, by module and name, in seconds."""

    def prepare(self, body, **fields):
        """Write the training's script and `run.json`; `fields` replace those of the run file."""
        script = self.directory / "train.py"
        script.write_text(PRELUDE + textwrap.dedent(body))
        run = RunFile(
            **{
                "run_id": self.directory.name,
                "preset": "stand-in",
                "knobs": {"precision": "fp32", "strategy": "single", "optimizer": "adamw"},
                "argv": [sys.executable, "-I", "-S", "-u", str(script), str(self.directory)],
                "env": {},
                "python": "/opt/env/bin/python",
                "cwd": str(self.directory),
                "boot_id": boot_id(),
                "clock": ClockAnchor(monotonic_ns=time.monotonic_ns(), wall_ns=time.time_ns()),
                **fields,
            }
        )
        (self.directory / "run.json").write_bytes(msgspec.json.encode(run))

    def supervise(self, bounds=None, **popen):
        """Start the supervisor and wait for its first event, as a launch does, whose bounds it has by default."""
        # Held until the supervisor has its own, or a reader would take the run for one that was left behind.
        with shared_lock(self.directory), (self.directory / "supervisor.log").open("ab") as log:
            self.supervisor = subprocess.Popen(
                self._command(bounds), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, **popen
            )
            events = self.directory / "events.jsonl"
            until(lambda: events.exists() and (events.is_symlink() or events.stat().st_size), "the first event")

    def _command(self, bounds):
        python = [sys.executable, "-P"]
        if bounds is None and not self.waits:
            return [*python, "-m", SupervisorBounds.__module__, str(self.directory)]
        imports = "from pathlib import Path; from trainfast_runner.running import supervisor; "
        waits = "".join(f"{name} = {seconds}; " for name, seconds in self.waits.items())
        call = f"supervisor.supervise(Path({str(self.directory)!r}), supervisor.{bounds or SupervisorBounds()!r})"
        return [*python, "-c", imports + waits + call]

    def start(self, body, bounds=None, **fields):
        """Write the script and `run.json`, and start the supervisor."""
        self.prepare(body, **fields)
        self.supervise(bounds)

    def train(self, body, bounds=None, **fields):
        """Start it, and wait until the supervisor says that the run is running."""
        self.start(body, bounds, **fields)
        self.in_training()

    def end(self, seconds=PATIENCE_S):
        """Wait for the supervisor to end; the result it wrote."""
        status = self.supervisor.wait(seconds)
        text = (self.directory / "supervisor.log").read_text()
        assert status == 0, text
        result = read_result(self.directory)
        assert result is not None, f"no result.json; the supervisor said: {text}"
        return result

    def result_of(self, body, bounds=None, **fields):
        """The result of a run from start to end."""
        self.start(body, bounds, **fields)
        return self.end()

    def signal(self, signum):
        """Signal the supervisor."""
        self.supervisor.send_signal(signum)

    def events(self, kind):
        """The events of that kind so far."""
        return [event for event in read_all(self.directory / "events.jsonl", Event)[0] if event.kind == kind]

    def worker(self, kind, rank=0):
        """The worker lines of that kind so far, which may be one of the test's own."""
        name = "worker.jsonl" if rank == 0 else f"worker.rank{rank}.jsonl"
        lines, _ = read_all(self.directory / name, dict[str, Any])
        return [line for line in lines if line["kind"] == kind]

    def in_training(self):
        """Wait until the supervisor says that the run is running."""
        until(lambda: run_state(self.directory).state == "running", "the state running")

    def child_pid(self):
        """The training's direct child."""
        return until(lambda: self.events("launched"), "the training to be launched")[0].pid

    def pids(self):
        """Every rank that ever said it started."""
        return [line["pid"] for rank in range(8) for line in self.worker("started", rank)]

    def clean_up(self):
        """Leave no process behind, whatever the test did."""
        if self.supervisor is not None and self.supervisor.poll() is None:
            self.supervisor.send_signal(signal.SIGUSR1)
            try:
                self.supervisor.wait(60)
            except subprocess.TimeoutExpired:
                self.supervisor.kill()
                self.supervisor.wait()
        for rank in running_ranks(self.directory):
            os.kill(rank.pid, signal.SIGKILL)


def process_exists(pid):
    """True if any process has that pid, a zombie included."""
    return Path(f"/proc/{pid}").exists()


@pytest.fixture
def run(tmp_path):
    directory = tmp_path / "20260101-000000-stand-in-0001"
    directory.mkdir(mode=0o700)
    made = Run(directory)
    yield made
    made.clean_up()


@pytest.fixture
def ended_clean():
    """Check after every end: result there, lock free, no process left."""

    def check(run):
        assert (run.directory / RESULT_FILE).exists()
        assert not is_alive(run.directory)
        assert not [pid for pid in run.pids() if process_exists(pid)]

    return check
