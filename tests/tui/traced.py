"""A predictor whose models are known by heart and whose traces end when a test says so."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from recorded import MIB

from trainfast_runner.errors import UserError
from trainfast_runner.machine.training_python import ProgramCancelled
from trainfast_runner.memory import tracing
from trainfast_runner.memory.corrections import DeviceCorrections
from trainfast_runner.records.run_file import Prediction
from trainfast_runner.settings.spec import RunSpec


class TenMiBASample:
    """A memory model whose arithmetic fits in a head."""

    device = "cpu"
    parameters = 3_000_000
    corrections = DeviceCorrections()
    segments = ()
    stacks = ()
    optimizer_work = (1000.0, 1e9, 1e9)

    def corrected_for(self, gpu: str | None) -> "TenMiBASample":
        """Nothing is known of any GPU."""
        return self

    def correction_for(self, spec: RunSpec, ranks: int) -> None:
        """Nothing has been measured."""

    def predict(self, spec: RunSpec, ranks: int = 1) -> Prediction:
        batch = int(str(spec.knobs["batch_size"]))
        return Prediction(
            total_bytes=(100 + 10 * batch) * MIB, params_bytes=25 * MIB, grads_bytes=25 * MIB,
            optimizer_bytes=50 * MIB, activations_bytes=10 * batch * MIB, temporary_bytes=0, communication_bytes=0,
            phase="forward_backward",
        )  # fmt: skip

    def max_batch(self, spec: RunSpec, ranks: int, limit_bytes: int) -> int:
        return max(0, (limit_bytes // MIB - 100) // 10)


class Tracer:
    """Stands in for the predictor: `key` tells models apart, and every trace waits for `go`."""

    def __init__(self, key: Callable[[RunSpec], object], *known: object) -> None:
        self._key = key
        self.known = list(known)
        self.traced: list[object] = []
        self.cancelled: list[object] = []
        self.refusal: UserError | None = None
        self.go = threading.Event()

    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> "Tracer":
        """Take the place of the traces until the test ends."""
        monkeypatch.setattr(tracing, "cached_model", self.cached)
        monkeypatch.setattr(tracing, "cached_models", self.all_cached)
        monkeypatch.setattr(tracing, "trace_model", self.trace)
        monkeypatch.setattr(tracing, "trace_models", self.trace_all)
        return self

    def cached(self, spec: RunSpec, device: str = "cpu", python: str | None = None) -> TenMiBASample | None:
        return TenMiBASample() if self._key(spec) in self.known else None

    def all_cached(
        self, device: str, python: str | None, gpu: str | None = None
    ) -> Callable[[RunSpec], TenMiBASample | None]:
        """Return the models known now, as a function of the spec."""
        return self.cached

    def trace_all(
        self,
        specs: list[RunSpec],
        device: str,
        python: str | None,
        cancelled: threading.Event | None = None,
        **_: object,
    ) -> Iterator[tuple[int, TenMiBASample]]:
        """Trace one spec after the other."""
        for place, spec in enumerate(specs):
            yield place, self.trace(spec, device, python, cancelled)

    def trace(
        self,
        spec: RunSpec,
        device: str = "cpu",
        python: str | None = None,
        cancelled: threading.Event | None = None,
        *_: object,
        **__: object,
    ) -> TenMiBASample:
        model = self._key(spec)
        self.traced.append(model)
        assert cancelled is not None
        deadline = time.monotonic() + 60
        while not self.go.wait(0.01):
            if cancelled.is_set():
                self.cancelled.append(model)
                raise ProgramCancelled("nobody waits")
            assert time.monotonic() < deadline
        if self.refusal is not None:
            raise self.refusal
        self.known.append(model)
        return TenMiBASample()
