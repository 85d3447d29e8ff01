"""The work beside runs: advice, predictions, and explanations of out-of-memory errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from trainfast_runner.records.home import Home
from trainfast_tui.control.messages import NextRunPredicted, Post, TrainingPython
from trainfast_tui.control.prediction import (
    PredictionRequest,
    Predictor,
    SharedTracer,
    SpeedKey,
    asks_anew,
    request_for,
    spec_on,
)
from trainfast_tui.control.run_control import OomExplainer
from trainfast_tui.control.threads import SituationGatherer
from trainfast_tui.live.snapshot import SearchKind
from trainfast_tui.next_run.next_run import has_same_model
from trainfast_tui.next_run.sources import NextRunMemory, NextRunSpeed, measured_memory, measured_speed
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


class BackgroundWork:
    """Works in threads of its own, and gives way to everything that is measured."""

    def __init__(self, home: Home, post: Post, python: TrainingPython) -> None:
        self.tracer = SharedTracer()
        self.predictor = Predictor(post, python, self.tracer.get, home)
        self._memory: NextRunMemory | None = None
        self._speed: NextRunSpeed | None = None
        self._newest_request: PredictionRequest | None = None
        """The newest request of a prediction; none follows that asks for the same."""
        self.situations = SituationGatherer(home, post, python)
        self.oom_explainer = OomExplainer(post, python, self.tracer.get)

    def stop(self, wait_s: float) -> None:
        """End all work, and wait at most this long for each trace's process to end."""
        self.predictor.cancel(wait_s)
        self.oom_explainer.cancel(wait_s)
        self.tracer.close()

    def update(
        self,
        next_run: NextRun | None,
        machine: Machine | None,
        snapshot: Snapshot | None,
        running_search: SearchKind | None,
        *,
        is_device_used: bool,
        has_other_live_run: bool,
    ) -> None:
        """Begin or give up work after a change of any of these."""
        run = snapshot.run if snapshot is not None else None
        self.situations.update(next_run, machine, run, is_device_used=is_device_used)
        self.oom_explainer.explain_if_oom(run, may_trace=not is_device_used)
        if next_run is not None and next_run.script is not None:
            # A script has no model to trace before it runs.
            self.predictor.cancel()
            self._memory, self._speed, self._newest_request = NextRunMemory(reason=SCRIPT_NOT_PREDICTED), None, None
        elif next_run is not None and machine is not None:
            if machine.used_by(next_run.spec.knobs["devices"]).device == "cuda":
                # The trace has memory of its own on the GPU, which a run would take for another process's.
                may_trace = not is_device_used
            else:
                may_trace = running_search is None and not has_other_live_run and not _is_measured(run)
            speed_key = _speed_key(run, running_search)
            request = request_for(next_run, machine, snapshot, may_trace=may_trace, speed_key=speed_key)
            # While the device is used, free memory moves with the run or search that uses it.
            if asks_anew(request, self._newest_request, keeps_memory=is_device_used):
                self._newest_request = request
                self.predictor.request(request)

    def note_prediction(self, message: NextRunPredicted) -> None:
        """Keep the newest prediction."""
        self._memory, self._speed = message.memory, message.speed

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


def _speed_key(run: RunSnapshot | None, running_search: SearchKind | None) -> SpeedKey:
    """Return a value that changes with the sources of predicted speeds: runs and searches."""
    return run.run_id if run is not None else "", run is not None and run.result is not None, running_search


def _is_measured(run: RunSnapshot | None) -> bool:
    """True if a live run is past its start: a trace during the start is that run's own prediction."""
    return run is not None and run.is_live and run.state != "starting"
