"""The throttle reasons and counters of one GPU, believed only while they behave."""

from __future__ import annotations

from typing import Any

from trainfast_runner.machine.telemetry import throttle
from trainfast_runner.machine.telemetry.duration_counter import DurationCounter
from trainfast_runner.machine.telemetry.energy import EnergyCounter
from trainfast_runner.machine.telemetry.field_values import CAUSE_COUNTERS
from trainfast_runner.machine.telemetry.throttle import REASONS_OF_COUNTER, SampledReasons


class CounterChecks:
    """Checks each reading of one GPU against those before it. `values` are by field of `DeviceReading`."""

    def __init__(self) -> None:
        self._sampled = SampledReasons()
        self._last_bits = 0
        self.start_again()

    def start_again(self) -> None:
        """Expect counters from 0 on: a reloaded driver counts from zero."""
        self._durations: dict[str, DurationCounter] = {}
        self._energy = EnergyCounter()

    @property
    def has_suspect(self) -> bool:
        """True if a counter stood still while its throttle reasons were shown."""
        return any(counter.suspect for counter in self._durations.values())

    def decode_reasons(self, values: dict[str, Any]) -> set[str] | None:
        """Replace the bits of the throttle reasons in `values` by names; return them, None without a reading."""
        bits = values.get("throttle_reasons")
        if bits is None:
            return None
        names = values["throttle_reasons"] = throttle.decode(throttle.believed(bits, self._last_bits))
        self._last_bits = bits
        return set(names)

    def drop_implausible(self, values: dict[str, Any], reasons: set[str] | None, t_ns: int) -> dict[str, str]:
        """Set the counters in `values` that misbehave to None; return the reason by counter.

        If one of the counters that moved together is dropped, all are; only the first is named.
        """
        distrusted: dict[str, str] = {}
        for name, counter_reasons in REASONS_OF_COUNTER.items():
            if values.get(name) is None:
                continue
            counter = self._durations.get(name)
            if counter is None:
                counter = self._durations[name] = DurationCounter(moved=name in CAUSE_COUNTERS)
            values[name] = counter.accept(
                values[name], t_ns, None if reasons is None else bool(reasons & counter_reasons)
            )
            if counter.distrust is not None:
                distrusted[name] = counter.distrust
                if name in CAUSE_COUNTERS:
                    for moved_name in CAUSE_COUNTERS:
                        values[moved_name] = None
                        self._durations.pop(moved_name, None)
        if values.get("energy_mj") is not None:
            values["energy_mj"] = self._energy.accept(values["energy_mj"], values.get("power_w"), t_ns)
            if self._energy.distrust is not None:
                distrusted["energy_mj"] = self._energy.distrust
        return distrusted

    def see_bits(self, bits: int, t_ns: int) -> None:
        """Add throttle reasons that were read between two readings."""
        self._sampled.see(throttle.decode(bits), t_ns)

    def throttled_ns(self, reasons: set[str], t_ns: int) -> dict[str, int]:
        """Add the reasons of a reading; return the throttled time by cause, from all reasons so far."""
        self._sampled.see(reasons, t_ns)
        return self._sampled.held_ns()
