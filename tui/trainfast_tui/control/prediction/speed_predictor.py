"""Predict the next run's speed from its memory model, beside its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from trainfast_runner.errors import UserError
from trainfast_tui.control.messages import TrainingPython
from trainfast_tui.control.prediction.prediction_request import SpeedKey
from trainfast_tui.next_run.memory_and_speed import NextRunSpeed

if TYPE_CHECKING:
    from trainfast_runner.machine.devices import Machine
    from trainfast_runner.memory.model import MemoryModel
    from trainfast_runner.records.home import Home
    from trainfast_runner.records.run_file import PredictedSpeed
    from trainfast_runner.search.speed.device_speed_model import DeviceSpeedModel
    from trainfast_runner.settings.spec import RunSpec


class TracedSpec(msgspec.Struct, frozen=True):
    """A spec with the memory model of its trace."""

    spec: RunSpec
    model: MemoryModel


class SpeedPredictor:
    """Predicts speeds on a device from earlier runs, read again when `speed_key` changes. For one thread."""

    def __init__(self, home: Home, python: TrainingPython) -> None:
        self._home, self._python = home, python
        self._model: tuple[object, DeviceSpeedModel] | None = None
        """The newest speed model, with the key of all that it was made for."""

    def predict(
        self, traced: TracedSpec, reference: TracedSpec | None, machine: Machine, speed_key: SpeedKey
    ) -> NextRunSpeed:
        """Predict the speed of both specs."""
        try:
            predicted = self._predict(traced, machine, speed_key)
            predicted_reference = None if reference is None else self._predict(reference, machine, speed_key)
        except UserError as error:
            return NextRunSpeed(reason=error.message)
        except OSError as error:
            return NextRunSpeed(reason=str(error))
        if isinstance(predicted, str):
            return NextRunSpeed(reason=predicted)
        return NextRunSpeed(
            predicted,
            reference_samples_per_s=(
                None
                if predicted_reference is None or isinstance(predicted_reference, str)
                else predicted_reference.median
            ),
        )

    def _predict(self, traced: TracedSpec, machine: Machine, speed_key: SpeedKey) -> PredictedSpeed | str:
        """Return the predicted speed, or why there is none. Raises UserError for devices that do not exist."""
        from trainfast_runner.search.speed.predicted_speed import UnknownSpeed
        from trainfast_runner.settings.device_counts import device_count

        spec = traced.spec
        model = self._speed_model(spec, machine, speed_key)
        predicted = model.predict(spec, device_count(spec, machine), traced.model)
        return predicted.reason if isinstance(predicted, UnknownSpeed) else predicted

    def _speed_model(self, spec: RunSpec, machine: Machine, speed_key: SpeedKey) -> DeviceSpeedModel:
        from trainfast_runner.search.speed.device_speed_model import speed_model_on
        from trainfast_runner.search.speed.earlier_speeds import SpeedDevice, training_of
        from trainfast_runner.settings.device_counts import first_gpu_name

        device = SpeedDevice(machine.used_by(spec.knobs["devices"]).device, first_gpu_name(spec, machine) or "")
        key = (training_of(spec), device, speed_key)
        if self._model is None or self._model[0] != key:
            self._model = key, speed_model_on(self._home, spec, device, self._python)
        return self._model[1]
