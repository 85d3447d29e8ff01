"""Following a run directory while it is written, and the threads around the app."""

import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
from recorded import START_NS, S, a_ramp_tick, a_run, a_step, a_tick, own_supervisor, with_start, write_lines
from still import a_live_ramp, a_live_run

from trainfast_runner.machine.processes import identify
from trainfast_runner.records.capped_file import LOG_LINES_KEPT
from trainfast_runner.records.run_directory import RESULT_FILE, shared_lock
from trainfast_runner.records.run_lines import Event
from trainfast_runner.records.worker_lines import StartedLine
from trainfast_runner.running.follower import RECENT_BYTES, STEPS_KEPT, Follower, newest_run
from trainfast_runner.running.present_state import STOP_GRACE_S
from trainfast_tui.cli import launching
from trainfast_tui.cli.launching import LOOK_EVERY_S, follow
from trainfast_tui.cli.signals import Signals
from trainfast_tui.control.messages import SnapshotTaken, TerminalLost
from trainfast_tui.live.reader import LONGEST_PERIOD_S, PERIOD_BESIDE_TRAINING_S, SHORTEST_PERIOD_S, Pacer, Reader
from trainfast_tui.live.snapshot import Snapshot
from trainfast_tui.screens.base import PostedMessage
from trainfast_tui.terminal import textual_app


def append(path, *records):
    with path.open("ab") as file:
        for record in records:
            file.write(msgspec.json.encode(record) + b"\n")


def test_a_poll_gives_what_came_since_the_last(home, hold):
    directory = a_live_run(home, hold, steps=10)
    follower = Follower(directory)
    first = follower.poll()
    assert (first.state, first.supervised, len(first.steps)) == ("running", True, 10)
    with (directory / "steps.jsonl").open("ab") as file:
        half = msgspec.json.encode(a_step(12))
        file.write(msgspec.json.encode(a_step(11)) + b"\nbroken\n" + half[:20])
        file.flush()
        second = follower.poll()
        assert [step.step for step in second.steps][-1] == 11
        assert second.unreadable_lines == 1
        file.write(half[20:] + b"\n")
    assert follower.poll().steps[-1].step == 12


def test_a_figure_out_of_bounds_makes_its_line_unreadable(home, hold):
    directory = a_live_run(home, hold, steps=20)
    damaged = [
        msgspec.structs.replace(a_step(21), data_ms=1e308),
        msgspec.structs.replace(a_step(22), phase_peaks={"optimizer": 2**63}),
    ]
    append(directory / "steps.jsonl", *damaged, a_step(23))
    followed = Follower(directory).poll()
    assert [step.step for step in followed.steps][-2:] == [20, 23]
    assert followed.unreadable_lines == 2


def test_a_step_is_joined_to_its_devices_when_a_sample_after_its_end_has_come(home, hold):
    directory = a_live_ramp(home, hold, 24)
    follower = Follower(directory)
    first = follower.poll()
    assert len(first.conditions) < len(first.steps) == 60
    assert first.conditions[-1].t_ns <= first.ticks[-1].t_ns
    assert first.diagnosis[0].rule == "thermal"
    assert first.steady.still_warming is True
    append(directory / "telemetry.jsonl", *(a_ramp_tick(second) for second in range(24, 38)))
    second = follower.poll()
    assert [one.step for one in second.conditions] == list(range(1, second.conditions[-1].step + 1))
    assert second.conditions[-1].step > first.conditions[-1].step
    held = {one.step for one in second.conditions if (one.throttled_ms["thermal"] or 0) > 1}
    assert held == set(range(min(held), max(held) + 1))


def test_throughput_is_summed_when_every_rank_has_written_the_step(home, hold):
    ddp = {"strategy": "ddp", "devices": 2}
    directory = with_start(a_live_run(home, hold, steps=0, knobs=ddp), world_size=2)
    follower = Follower(directory)
    append(directory / "steps.jsonl", *(a_step(number) for number in (1, 2, 3)))
    append(directory / "steps.rank1.jsonl", *(a_step(number) for number in (1, 2)))
    snapshot = follower.poll()
    one = a_step(2)
    assert len(snapshot.rates.samples_per_s) == 2
    assert snapshot.rates.samples_per_s[1] == pytest.approx(2 * one.samples / one.step_ms * 1e3)
    assert len(snapshot.steps) == 3


def bytes_read():
    """By this process so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_of_a_long_run_only_the_end_is_read_and_the_first_loss(home, hold):
    directory = a_live_run(home, hold, steps=0)
    write_lines(directory / "steps.jsonl", [a_step(number, step_ms=1.0) for number in range(1, 20_001)])
    (directory / "output.log").write_text("".join(f"line {number}\n" for number in range(50_000)))
    before = bytes_read()
    snapshot = Follower(directory).poll()
    assert bytes_read() - before < RECENT_BYTES + (1 << 20)
    assert (directory / "steps.jsonl").stat().st_size > 2 * RECENT_BYTES
    assert (len(snapshot.steps), snapshot.steps[-1].step) == (STEPS_KEPT, 20_000)
    assert snapshot.first_loss is not None
    assert snapshot.first_loss > 7.9
    assert (len(snapshot.log), snapshot.log[-1]) == (LOG_LINES_KEPT, "line 49999")


def test_damage_and_holes_are_survived(home):
    directory = a_run(home)
    (directory / "run.json").write_bytes(b"{")
    (directory / "telemetry.jsonl").write_bytes(b"\0" * 5000 + b"\n{}\n" + msgspec.json.encode(a_tick(1)) + b"\n")
    (directory / "output.log").write_bytes(b"head\n" + b"\0" * 10_000 + b"tail \xff\xfe\r\n")
    snapshot = Follower(directory).poll()
    assert snapshot.run_file is None
    assert (snapshot.state, len(snapshot.ticks), snapshot.log) == ("finished", 1, ("head", "tail ��"))
    empty = home.directory("20261121-000000-empty-0000")
    empty.mkdir()
    assert (Follower(empty).poll().steps, Follower(home.directory("never")).poll().state) == ((), "lost")


def test_the_newest_live_run_goes_before_a_newer_ended_one_and_none_that_cannot_be_read(home, hold):
    (unreadable := home.directory("20261123-000000-tiny-llama-0001")).mkdir(parents=True)
    (unreadable / "run.json").symlink_to("run.json")
    assert newest_run(home) is None
    readable = a_run(home, "20261121-000000-tiny-llama-0002")
    assert newest_run(home) == readable
    running = a_live_run(home, hold)
    a_run(home, "20261122-000000-tiny-llama-ffff")
    assert newest_run(home) == running


def test_the_reader_follows_and_stops_at_once(home, hold):
    directory = a_live_run(home, hold)
    taken = []
    seen = threading.Event()

    def post(snapshot):
        taken.append(snapshot)
        if snapshot.run is not None and snapshot.ticks:
            seen.set()

    reader = Reader(home, post)
    reader.period_s = 3600.0
    reader.start()
    assert seen.wait(60), "the first sample of the machine is shown when it comes"
    assert taken[-1].run.directory == directory
    assert taken[-1].tick is not None
    reader.stop(timeout_s=60)
    assert not reader.is_alive(), "it does not wait for its period"


def test_a_reader_that_breaks_says_so(home):
    errors = []

    def post(snapshot):
        raise ZeroDivisionError

    reader = Reader(home, post, errors.append)
    reader.start()
    reader.join(60)
    assert [type(error) for error in errors] == [ZeroDivisionError]


def test_a_deleted_run_makes_room_for_the_newest(home):
    first = a_run(home, "20261121-000000-tiny-llama-0001")
    second = a_run(home, "20261121-000001-tiny-llama-0002")
    seen = []
    reader = Reader(home, lambda snapshot: seen.append(snapshot.run.directory if snapshot.run else None))
    reader.period_s = 0.05
    reader.start()
    deadline = time.monotonic() + 60
    while second not in seen and time.monotonic() < deadline:
        time.sleep(0.02)
    home.remove(second.name)
    while first not in seen and time.monotonic() < deadline:
        time.sleep(0.02)
    reader.stop()
    assert seen[-1] == first


def test_only_the_newest_snapshot_counts():
    snapshot = Snapshot(taken_ns=START_NS + S, run=None, ticks=(), has_read_home=True)
    taken = PostedMessage(SnapshotTaken(snapshot))
    assert taken.can_replace(PostedMessage(SnapshotTaken(snapshot)))
    assert not taken.can_replace(PostedMessage(TerminalLost()))


def test_a_slow_terminal_halves_the_pace_until_it_keeps_up_and_so_does_a_training_on_the_cpu():
    pacer = Pacer()
    assert (pacer.note(0.01), pacer.words, pacer.note(0.9)) == (SHORTEST_PERIOD_S, "", 2 * SHORTEST_PERIOD_S)
    assert pacer.words == "the screen is behind: repainting every 1 s"
    for _ in range(5):
        pacer.note(0.0, unwritten_texts=9)
    assert pacer.period_s == LONGEST_PERIOD_S
    for _ in range(40):
        pacer.note(0.0)
    assert (pacer.period_s, pacer.words) == (SHORTEST_PERIOD_S, "")
    pacer = Pacer()
    assert pacer.note(0.01, trains_on_cpu=True) == PERIOD_BESIDE_TRAINING_S > SHORTEST_PERIOD_S
    assert pacer.words == "", "nothing is late"
    assert (pacer.note(0.9, trains_on_cpu=True), pacer.note(0.9, trains_on_cpu=True)) == (PERIOD_BESIDE_TRAINING_S, 2.0)
    assert Pacer().note(0.01) == SHORTEST_PERIOD_S


def test_a_terminal_that_hung_up_is_noticed(monkeypatch):
    left = threading.Event()
    lost = threading.Event()
    ended = []
    monkeypatch.setattr(textual_app, "GRACE_S", 0.05)

    def end(status):
        ended.append(status)
        left.set()

    monkeypatch.setattr(os, "_exit", end)
    try:
        master, slave = pty.openpty()
        textual_app.watch_for_hangup(slave, lost.set)
        assert not lost.wait(0.2)
        os.close(master)
        assert lost.wait(60)
        assert left.wait(60)
    finally:
        os.close(slave)
    assert ended == [129]


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
