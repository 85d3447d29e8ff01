"""Following a run from the command line: what it waits for at the end."""

import signal
import subprocess
import sys
import threading
import time

from recorded import START_NS, S, a_run, own_supervisor, write_lines

from trainfast_runner.machine.processes import identify
from trainfast_runner.records.run_directory import RESULT_FILE, shared_lock
from trainfast_runner.records.run_lines import Event
from trainfast_runner.records.worker_lines import StartedLine
from trainfast_runner.running.present_state import STOP_GRACE_S
from trainfast_tui.cli import launching
from trainfast_tui.cli.launching import LOOK_EVERY_S, follow
from trainfast_tui.cli.signals import Signals


def test_a_run_whose_result_is_still_being_written_is_waited_for(home, hold, monkeypatch):
    directory = a_run(home, state="oom")
    result = (directory / RESULT_FILE).read_bytes()
    (directory / RESULT_FILE).unlink()
    hold(directory)
    write_lines(directory / "events.jsonl", [own_supervisor(), Event(t_ns=START_NS + S, kind="state", state="oom")])
    looks = []

    def written_meanwhile(seconds):
        if seconds == LOOK_EVERY_S:
            looks.append(seconds)
            (directory / RESULT_FILE).write_bytes(result)

    monkeypatch.setattr(launching.time, "sleep", written_meanwhile)
    found = follow(directory, Signals(), interrupt_stops=True)
    assert found.state == "oom"
    assert len(looks) == 1


DEAF = """
import signal
signal.signal(signal.SIGTERM, lambda *_: print("asked to end", flush=True))
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_a_second_interrupt_kills_a_run_without_supervisor_that_does_not_end_when_asked(home):
    directory, signals = a_run(home, with_result=False), Signals()
    with shared_lock(directory) as lock:
        rank = subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE, pass_fds=[lock], text=True)
    try:
        assert rank.stdout.readline() == "ready\n"
        process = identify(rank.pid)
        started = StartedLine(t_ns=START_NS + S, rank=0, pid=process.pid, start_ticks=process.start_ticks)
        write_lines(directory / "worker.jsonl", [started])
        gone = Event(t_ns=START_NS, kind="supervisor", pid=1, start_ticks=1)
        write_lines(directory / "events.jsonl", [gone])

        def press_again_once_asked(answers):
            answers.readline()
            signals.receive(signal.SIGINT, None)

        signals.receive(signal.SIGINT, None)
        pressing = threading.Thread(target=press_again_once_asked, args=(rank.stdout,))
        pressing.start()
        began_s = time.monotonic()
        result = follow(directory, signals, interrupt_stops=True)
        assert time.monotonic() - began_s < STOP_GRACE_S
        assert result.state == "lost"
        pressing.join()
        assert rank.wait() == -signal.SIGKILL
    finally:
        rank.kill()
        rank.communicate()
