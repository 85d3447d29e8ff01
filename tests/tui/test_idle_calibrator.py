"""The device is calibrated once while the machine is idle, and never beside a training."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from msgspec.structs import replace
from recorded import START_NS, S, a_tick
from still import CPU, a_snapshot

from trainfast_runner.machine import calibration
from trainfast_runner.machine.calibration import Ceiling
from trainfast_runner.machine.worker_programs import ProgramCancelled
from trainfast_runner.records.file_locks import locked
from trainfast_runner.records.home import Home
from trainfast_runner.records.json_lines import write_atomically
from trainfast_runner.running import present_state
from trainfast_tui.control import threads
from trainfast_tui.control.idle_calibrator import IDLE_S, MAX_TRIES, IdleCalibrator
from trainfast_tui.control.messages import DeviceCalibrated
from trainfast_tui.live.snapshot import Snapshot

QUIET = Ceiling(device="cpu", name="", tflops={"fp32": 0.1}, copy_gb_per_s=1.0, operation_us=1.0)


class Calibrations:
    """Stands in for the measurement, which takes seconds of every core: lasts until `go` or until it is given up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, home: Home) -> None:
        self.begun, self.ended, self.go = threading.Event(), threading.Event(), threading.Event()
        self.posted: queue.Queue[object] = queue.Queue()
        self.calibrator = IdleCalibrator(home, self.posted.put, None)
        monkeypatch.setattr(calibration, "calibrate", self._calibrate)

    def _calibrate(
        self, home: Home, python: str | None, cancelled: threading.Event, *, in_background: bool = False
    ) -> Ceiling:
        assert in_background, "its results say what measured the ceiling"
        self.begun.set()
        while not self.go.wait(0.005):
            if cancelled.is_set():
                self.ended.set()
                raise ProgramCancelled
        return QUIET

    def look(self, second: float, *, is_device_used: bool = False, cpu_percent: float = 1.0) -> None:
        self.calibrator.update(seen(second, cpu_percent), CPU, is_device_used=is_device_used)


def seen(second: float, cpu_percent: float) -> Snapshot:
    """The machine at this second."""
    tick = a_tick(int(second), live=False)
    assert tick.host is not None
    tick = msgspec.structs.replace(tick, devices=[], host=msgspec.structs.replace(tick.host, cpu_percent=cpu_percent))
    return replace(a_snapshot(None, ticks=(tick,)), taken_ns=START_NS + int(second * S))


@pytest.fixture
def calibrations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Calibrations:
    return Calibrations(monkeypatch, Home(tmp_path))


def test_an_idle_machine_is_calibrated_once(calibrations: Calibrations) -> None:
    calibrations.look(0)
    calibrations.look(IDLE_S - 1)
    assert not calibrations.begun.is_set()
    calibrations.look(IDLE_S)
    assert calibrations.begun.wait(60)
    calibrations.go.set()
    assert isinstance(calibrations.posted.get(timeout=60), DeviceCalibrated)
    calibrations.begun.clear()
    for second in (100, 200, 300):
        calibrations.look(second)
    assert not calibrations.begun.is_set()


def test_a_busy_machine_is_left_alone(calibrations: Calibrations) -> None:
    for second in range(0, 200, 10):
        calibrations.look(second, cpu_percent=1.0 if second % 20 else 60.0)
    calibrations.look(300, is_device_used=True)
    assert not calibrations.begun.is_set()


def test_a_calibration_keeps_one_that_was_written_meanwhile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home, measured = Home(tmp_path), threading.Event()

    def measure(*_: object) -> Ceiling:
        measured.set()
        return msgspec.structs.replace(QUIET, name="ours")

    monkeypatch.setattr(calibration, "_device", lambda _executable: ("cpu", {}))
    monkeypatch.setattr(calibration, "_measure", measure)
    theirs = {"theirs": msgspec.structs.replace(QUIET, name="theirs")}
    with locked(tmp_path / f"{calibration.CALIBRATION_FILE}.lock"):
        ours = threading.Thread(target=calibration.calibrate, args=(home,))
        ours.start()
        assert measured.wait(60)
        write_atomically(tmp_path / calibration.CALIBRATION_FILE, msgspec.json.encode(theirs))
    ours.join(60)
    assert set(calibration.read(home)) == {"ours", "theirs"}


def test_a_training_that_begins_ends_the_measurement(calibrations: Calibrations) -> None:
    calibrations.look(0)
    calibrations.look(IDLE_S)
    assert calibrations.begun.wait(60)
    # Its own work is no other's.
    calibrations.look(IDLE_S + 1, cpu_percent=100.0)
    assert not calibrations.ended.is_set()
    calibrations.look(IDLE_S + 2, is_device_used=True)
    assert calibrations.ended.wait(60)


def test_a_measurement_that_a_training_ended_is_no_try(calibrations: Calibrations) -> None:
    for at in range(MAX_TRIES + 1):
        calibrations.begun.clear()
        calibrations.look(100 * at)
        calibrations.look(100 * at + IDLE_S)
        assert calibrations.begun.wait(60), f"{at} measurements were cancelled"
        calibrations.calibrator.cancel(60)


def test_a_try_that_finds_a_live_run_is_no_try(calibrations: Calibrations, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = threading.Semaphore(0)

    def live_runs(home: Home) -> list[str]:
        looks.release()
        return ["a run"]

    with monkeypatch.context() as patch:
        patch.setattr(present_state, "live_runs", live_runs)
        for at in range(MAX_TRIES):
            calibrations.look(100 * at)
            calibrations.look(100 * at + IDLE_S)
            assert looks.acquire(timeout=60)
            thread = calibrations.calibrator._work._thread
            assert thread is not None
            thread.join(60)
    calibrations.look(1000)
    calibrations.look(1000 + IDLE_S)
    assert calibrations.begun.wait(60)
    calibrations.go.set()


def test_a_measurement_that_was_cancelled_before_its_thread_began_is_no_try(calibrations: Calibrations) -> None:
    begin = threading.Event()

    class LateThread(threading.Thread):
        """A thread that the machine runs only when the test says so."""

        def run(self) -> None:
            begin.wait(60)
            super().run()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads, "threading", SimpleNamespace(Thread=LateThread, Event=threading.Event))
        for at in range(MAX_TRIES):
            begin.clear()
            calibrations.look(100 * at)
            calibrations.look(100 * at + IDLE_S)
            calibrations.calibrator.cancel()
            begin.set()
            calibrations.calibrator.cancel(60)
    calibrations.look(1000)
    calibrations.look(1000 + IDLE_S)
    assert calibrations.begun.wait(60)
    calibrations.go.set()
