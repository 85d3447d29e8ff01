"""The orders to a warm process, and the end of its wait."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest

from trainfast_runner.worker import orders
from trainfast_runner.worker.orders import Orders


@pytest.fixture
def search_lock(tmp_path: Path) -> Path:
    path = tmp_path / "search.lock"
    path.touch()
    return path


def held(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def order(control: Path, **fields: Any) -> None:
    with control.open("a") as file:
        file.write(json.dumps(fields) + "\n")


def test_line_n_is_order_n_and_the_last_line_ends_it(tmp_path: Path, search_lock: Path) -> None:
    control = tmp_path / "control.jsonl"
    one, other = Orders(control, search_lock), Orders(control, search_lock)
    fd = held(search_lock)
    probe, trial = {"do": "probe", "batch_size": 4, "steps": 2}, {"do": "trial", "knobs": {"batch_size": 8}}
    for fields in (probe, trial, {"do": "end"}):
        order(control, **fields)
    assert [one.next(), one.next(), one.next()] == [probe, trial, None]
    assert other.next() == probe
    os.close(fd)


def test_without_a_parent_every_rank_takes_what_was_ordered_and_then_ends(
    tmp_path: Path, search_lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "PARENT_CHECK_S", 0.0)
    control = tmp_path / "control.jsonl"
    order(control, do="probe", batch_size=4, steps=2)
    with control.open("a") as file:
        file.write('{"do":"probe","batch_si')
    for left in (Orders(control, search_lock), Orders(control, tmp_path / "gone")):
        assert left.next() == {"do": "probe", "batch_size": 4, "steps": 2}
        assert left.next() is None
