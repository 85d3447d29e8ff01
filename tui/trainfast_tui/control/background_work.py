"""The work beside runs: advice, predictions, and explanations of out-of-memory errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainfast_runner.records.home import Home
from trainfast_tui.control.messages import Post, TrainingPython
from trainfast_tui.control.prediction import NextRunPredictions, Predictor, SharedTracer, SpeedKey
from trainfast_tui.control.run_control import OomExplainer
from trainfast_tui.control.threads import SituationGatherer
from trainfast_tui.live.snapshot import SearchKind

if TYPE_CHECKING:
    from trainfast_runner.machine.devices import Machine
    from trainfast_runner.running.follower import RunSnapshot
    from trainfast_tui.live.snapshot import Snapshot
    from trainfast_tui.next_run.next_run import NextRun


class BackgroundWork:
    """Works in threads of its own, and gives way to everything that is measured."""

    def __init__(self, home: Home, post: Post, python: TrainingPython) -> None:
        self.tracer = SharedTracer()
        self.predictor = Predictor(post, python, self.tracer.get, home)
        self.predictions = NextRunPredictions(self.predictor)
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
            self.predictions.drop_prediction_of_script()
        elif next_run is not None and machine is not None:
            if machine.used_by(next_run.spec.knobs["devices"]).device == "cuda":
                # The trace has memory of its own on the GPU, which a run would take for another process's.
                may_trace = not is_device_used
            else:
                may_trace = running_search is None and not has_other_live_run and not _is_measured(run)
            speed_key = _speed_key(run, running_search)
            self.predictions.request(
                next_run, machine, snapshot, may_trace=may_trace, speed_key=speed_key, is_device_used=is_device_used
            )


def _speed_key(run: RunSnapshot | None, running_search: SearchKind | None) -> SpeedKey:
    """Return a value that changes with the sources of predicted speeds: runs and searches."""
    return run.run_id if run is not None else "", run is not None and run.result is not None, running_search


def _is_measured(run: RunSnapshot | None) -> bool:
    """True if a live run is past its start: a trace during the start is that run's own prediction."""
    return run is not None and run.is_live and run.state != "starting"
