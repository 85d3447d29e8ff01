"""A follower does not take a run for over while its result may still come."""

import json
import os
from pathlib import Path

import msgspec

from on_disk import result
from trainfast_runner.records.file_locks import shared_lock
from trainfast_runner.running.follower import Follower


def test_a_run_that_recorded_its_end_is_live_until_its_result_is_written(run):
    """Whoever waits for the last snapshot would otherwise wait for a result that it never shows."""
    run.prepare("")
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    us = {"t_ns": 1, "kind": "supervisor", "pid": os.getpid(), "start_ticks": ticks}
    ended = {"t_ns": 2, "kind": "state", "state": "finished", "reason": "all steps taken"}
    with shared_lock(run.directory):
        (run.directory / "events.jsonl").write_text(f"{json.dumps(us)}\n{json.dumps(ended)}\n")
        follower = Follower(run.directory)
        follower.poll()
        second = follower.poll()
        assert (second.state, second.result) == ("finished", None)
        (run.directory / "result.json").write_bytes(msgspec.json.encode(result(run.directory.name)))
        assert follower.poll().result is not None
