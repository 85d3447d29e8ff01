"""The orders to a warm process, and the end of its wait."""

import fcntl
import json
import os

import pytest

from trainfast_runner.worker import warm
from trainfast_runner.worker.warm import orders


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
    fd = held(search_lock)
    for batch_size in (4, 8):
        order(control, do="probe", batch_size=batch_size, steps=2)
    order(control, do="end")
    assert [order["batch_size"] for order in orders(control, search_lock)] == [4, 8]
    assert next(orders(control, search_lock))["batch_size"] == 4
    os.close(fd)


def test_without_a_parent_every_rank_takes_what_was_ordered_and_then_ends(tmp_path, search_lock, monkeypatch):
    monkeypatch.setattr(warm, "PARENT_CHECK_S", 0.0)
    control = tmp_path / "control.jsonl"
    order(control, do="probe", batch_size=4, steps=2)
    with control.open("a") as file:
        file.write('{"do":"probe","batch_si')
    for lock in (search_lock, tmp_path / "gone"):
        assert [order["batch_size"] for order in orders(control, lock)] == [4]
