"""The orders to a warm process, and the end of its wait."""

import fcntl
import json
import os

import msgspec
import pytest

from trainfast_runner.records import worker_lines
from trainfast_runner.worker import warm
from trainfast_runner.worker.warm import Orders, ProbeOrder, TrialOrder


@pytest.fixture
def search_lock(tmp_path):
    path = tmp_path / "search.lock"
    path.touch()
    return path


def held(path):
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def order(control, **fields):
    with control.open("a") as file:
        file.write(json.dumps(fields) + "\n")


def test_line_n_is_order_n_and_the_last_line_ends_it(tmp_path, search_lock):
    control = tmp_path / "control.jsonl"
    one, other = (Orders(control, search_lock, ProbeOrder) for _ in range(2))
    fd = held(search_lock)
    for batch_size in (4, 8):
        order(control, do="probe", batch_size=batch_size, steps=2)
    order(control, do="end")
    assert [one.next(), one.next(), one.next()] == [ProbeOrder(4, 2), ProbeOrder(8, 2), None]
    assert other.next() == ProbeOrder(4, 2)
    os.close(fd)


def test_order_of_a_trial_has_the_fields_that_the_search_writes(tmp_path, search_lock):
    written = worker_lines.TrialOrder(do="trial", knobs={"batch_size": 8}, untimed=1, steps=3, more=True)
    order(tmp_path / "control.jsonl", **msgspec.to_builtins(written))
    read = Orders(tmp_path / "control.jsonl", search_lock, TrialOrder).next()
    assert read == TrialOrder(knobs={"batch_size": 8}, untimed=1, steps=3, more=True)


def test_without_a_parent_every_rank_takes_what_was_ordered_and_then_ends(tmp_path, search_lock, monkeypatch):
    monkeypatch.setattr(warm, "PARENT_CHECK_S", 0.0)
    control = tmp_path / "control.jsonl"
    order(control, do="probe", batch_size=4, steps=2)
    with control.open("a") as file:
        file.write('{"do":"probe","batch_si')
    for left in (Orders(control, search_lock, ProbeOrder), Orders(control, tmp_path / "gone", ProbeOrder)):
        assert left.next() == ProbeOrder(batch_size=4, steps=2)
        assert left.next() is None
