"""The newest prediction of the next run, beside the measurements of the run on the screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from trainfast_tui.control.messages import NextRunPredicted
from trainfast_tui.control.prediction.prediction_request import (
    SpeedKey,
    free_memory_bytes,
    has_moved,
    request_for,
    spec_on,
)
from trainfast_tui.control.prediction.predictor import Predictor
from trainfast_tui.next_run.memory_and_speed import NextRunMemory, NextRunSpeed, measured_memory, measured_speed
from trainfast_tui.next_run.same_settings import has_same_model
from trainfast_tui.text.keys import key_of

if TYPE_CHECKING:
    from trainfast_runner.machine.devices import Machine
    from trainfast_runner.memory.headroom import PredictedFit
    from trainfast_runner.running.follower import RunSnapshot
    from trainfast_tui.live.snapshot import Snapshot
    from trainfast_tui.next_run.next_run import NextRun

SCRIPT_NOT_PREDICTED = (
    f"the memory of a script is not predicted; {key_of('main', 'batch')} finds its largest batch by trials"
)


class NextRunPredictions:
    """Requests predictions from `predictor`, and keeps the newest."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._memory: NextRunMemory | None = None
        self._speed: NextRunSpeed | None = None
        self._requested_for: tuple[object, ...] | None = None
        """The inputs of the newest request; for equal ones nothing is requested again."""
        self._free_bytes: tuple[int | None, ...] = ()
        """The free memory of the newest request, as `free_memory_bytes` returns it."""

    def note(self, message: NextRunPredicted) -> None:
        """Keep the newest prediction."""
        self._memory, self._speed = message.memory, message.speed

    def drop_prediction_of_script(self) -> None:
        """Give up the prediction under way: a script has no model to trace before it runs."""
        self._predictor.cancel()
        self._memory, self._speed, self._requested_for = NextRunMemory(reason=SCRIPT_NOT_PREDICTED), None, None

    def request(
        self,
        next_run: NextRun,
        machine: Machine,
        snapshot: Snapshot | None,
        *,
        may_trace: bool,
        speed_key: SpeedKey,
        is_device_used: bool,
    ) -> None:
        """Request a prediction of the next run, unless nothing has changed since the last request.

        While the device is used, free memory moves with the run or search that uses it, and starts no prediction.
        """
        inputs, free_bytes = (next_run, machine, may_trace, speed_key), free_memory_bytes(machine, snapshot)
        keeps_free_memory = is_device_used and bool(self._free_bytes)
        if inputs == self._requested_for and (keeps_free_memory or not has_moved(self._free_bytes, free_bytes)):
            return
        self._requested_for, self._free_bytes = inputs, free_bytes
        request = request_for(next_run, machine, snapshot, may_trace=may_trace, speed_key=speed_key)
        self._predictor.request(request)

    def memory(self, next_run: NextRun | None, shown_run: RunSnapshot | None) -> NextRunMemory | None:
        """Return the next run's predicted memory, and the measured memory of the run on the screen."""
        measured = measured_memory(_if_same_model(shown_run, next_run), next_run)
        return self._memory if measured is None else replace(self._memory or NextRunMemory(), measured=measured)

    def speed(self, next_run: NextRun | None, shown_run: RunSnapshot | None) -> NextRunSpeed | None:
        """Return the next run's predicted speed, and the measured one of the run on the screen.

        None without a prediction of either.
        """
        measured = measured_speed(_if_same_model(shown_run, next_run))
        if measured is None or (self._speed is None and measured.predicted is None):
            return self._speed
        return replace(self._speed or NextRunSpeed(), measured=measured)

    def fit(self, next_run: NextRun, machine: Machine | None) -> PredictedFit | None:
        """Return the next run's prediction; None while the newest one is about other settings."""
        memory = self._memory
        if memory is None or machine is None or memory.spec != spec_on(machine, next_run):
            return None
        return memory.fit


def _if_same_model(run: RunSnapshot | None, next_run: NextRun | None) -> RunSnapshot | None:
    """Return the run if it trains the next run's model; another model's figures say nothing of this one."""
    if run is None or run.run_file is None or next_run is None:
        return run
    return run if has_same_model(run.run_file, next_run.spec) else None
