"""The bottlenecks and the warm-up of a live run, renewed with every tick."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from trainfast_runner.records.result import Diagnosis
from trainfast_runner.records.result_conditions import SteadyState
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.records.run_lines import Event, Step
from trainfast_runner.records.tick import DeviceReading, Tick
from trainfast_runner.results.bottleneck.diagnose import diagnose
from trainfast_runner.results.bottleneck.measured_window import AVERAGED_NS, MeasuredWindow, foreign_processes
from trainfast_runner.results.bottleneck.steady_state import steady_state
from trainfast_runner.results.device_conditions import StepJoin, window_of

WINDOW_NS = 30_000_000_000
DIAGNOSED_STEPS = 200
"""Chosen, not measured: the newest seconds, and the most steps of them, that a live diagnosis looks at."""
MIN_LIVE_STEPS = 10
"""The fewest newest steps that a live diagnosis looks at, however long they took."""
STEADY_EVERY = 5
"""Ticks between two computations of the warm-up, over all kept steps."""


class LiveDiagnosis:
    """The newest `diagnosis` and `steady` state: `add` each rank's steps, and `renew` after each tick."""

    def __init__(self) -> None:
        self.diagnosis: tuple[Diagnosis, ...] = ()
        self.steady = SteadyState()
        self._renewed = 0
        self._steps: dict[int, deque[Step]] = {}

    def add(self, rank: int, steps: Iterable[Step]) -> None:
        """Take steps of a rank; warm-up steps are left out."""
        self._steps.setdefault(rank, deque(maxlen=DIAGNOSED_STEPS)).extend(step for step in steps if not step.warmup)

    def renew(
        self,
        run: RunFile,
        first_rank_steps: Sequence[Step],
        ticks: Sequence[Tick],
        events: Iterable[Event],
        join: StepJoin,
    ) -> None:
        """Diagnose the steps of the last `WINDOW_NS` that `ticks` (oldest first, at least one) cover.

        `first_rank_steps` are all steps of rank 0 that the reader still has: a steady state shows over several windows.
        """
        self._settle(run, first_rank_steps, ticks)
        until_ns = ticks[-1].t_ns
        steps = {rank: recent for rank, measured in self._steps.items() if (recent := _recent(measured, until_ns))}
        window = window_of(steps[min(steps)]) if steps else None
        if window is None:
            self.diagnosis = ()
            return
        ticks_of_window = [tick for tick in ticks if tick.t_ns >= window.begin_ns]
        self.diagnosis = tuple(
            diagnose(
                MeasuredWindow(
                    run=run,
                    steps=steps,
                    devices=join.conditions_between(window.begin_ns, window.end_ns),
                    samples=_by_device(ticks_of_window),
                    averages=_by_device(tick for tick in ticks_of_window if tick.t_ns >= window.begin_ns + AVERAGED_NS),
                    hosts=[tick.host for tick in ticks_of_window],
                    foreign=foreign_processes(run, events, window),
                )
            )
        )

    def _settle(self, run: RunFile, steps: Sequence[Step], ticks: Sequence[Tick]) -> None:
        """Renew the steady state, once in `STEADY_EVERY` ticks."""
        self._renewed += 1
        if self._renewed % STEADY_EVERY != 1:
            return
        watched_uuids = frozenset(run.watch_uuids)
        temperatures: dict[str, list[tuple[int, float]]] = {}
        for tick in ticks:
            for device in tick.devices:
                if device.uuid in watched_uuids and device.uuid is not None and device.temperature_c is not None:
                    temperatures.setdefault(device.uuid, []).append((tick.t_ns, device.temperature_c))
        measured_steps = [step for step in steps if not step.warmup and step.t_ns <= ticks[-1].t_ns]
        self.steady = steady_state(measured_steps, list(temperatures.values()))


def _by_device(ticks: Iterable[Tick]) -> dict[str, list[DeviceReading]]:
    samples: dict[str, list[DeviceReading]] = {}
    for tick in ticks:
        for device in tick.devices:
            if device.uuid is not None:
                samples.setdefault(device.uuid, []).append(device)
    return samples


def _recent(steps: Sequence[Step], until_ns: int) -> list[Step]:
    covered_steps = [step for step in steps if step.t_ns <= until_ns]
    if not covered_steps:
        return []
    # From the newest step and not from now: in a step longer than the window the last ones still count.
    since_ns = covered_steps[-1].t_ns - WINDOW_NS
    return [
        step
        for index, step in enumerate(covered_steps)
        if step.t_ns >= since_ns or index >= len(covered_steps) - MIN_LIVE_STEPS
    ]
