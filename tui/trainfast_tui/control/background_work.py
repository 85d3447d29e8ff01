"""The work beside runs: advice, predictions of the next run, and explanations of out-of-memory errors.

BackgroundWork asks when an input has changed; Predictor answers the newest request in a thread. Modules of the runner
that the first frame does not need are imported where they are used.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from trainfast_runner.errors import UserError
from trainfast_tui.control.messages import NextRunPredicted, Post, SituationGathered, ThreadFailed, TrainingPython
from trainfast_tui.control.run_control import OomExplainer
from trainfast_tui.control.threads import CancellableWork, start_thread
from trainfast_tui.live.snapshot import SearchKind
from trainfast_tui.next_run.next_run import NextRun
from trainfast_tui.next_run.sources import NextRunMemory, NextRunSpeed
from trainfast_tui.text.event_words import importing_words
from trainfast_tui.text.format import count
from trainfast_tui.text.keys import key_of

if TYPE_CHECKING:
    from trainfast_runner.machine.devices import Machine
    from trainfast_runner.memory.headroom import PredictedFit
    from trainfast_runner.memory.model import MemoryModel
    from trainfast_runner.records.home import Home
    from trainfast_runner.records.tick import Tick
    from trainfast_runner.running.follower import RunSnapshot
    from trainfast_runner.search.advice import Situation
    from trainfast_runner.search.predicted_speed import DeviceSpeedModel
    from trainfast_runner.settings.spec import RunSpec
    from trainfast_tui.live.snapshot import Snapshot


SpeedKey = tuple[object, ...]
"""A value that changes with the runs and searches that speeds are predicted from."""
MOVED_SHARE = 0.01
"""Chosen, not measured: a smaller change of free memory is noise of an idle machine, and starts no prediction."""


class PredictionRequest(msgspec.Struct, frozen=True):
    """The spec to predict for, and the machine with the memory that is free now."""

    spec: RunSpec
    machine: Machine
    free_bytes: int | None
    """Free memory of the host now."""
    may_trace: bool
    """False while a run is measured: a trace would take its CPU."""
    reference: RunSpec | None = None
    """The spec to compare with (`NextRun.reference_spec`); None if no knob differs from it."""
    speed_key: SpeedKey = ()
    """Changes when there are new runs or searches to predict the speed from."""


def asks_anew(request: PredictionRequest, before: PredictionRequest | None, *, keeps_memory: bool) -> bool:
    """True unless `before` asked for the same; free memory counts as the same below `MOVED_SHARE`.

    With `keeps_memory`, all known free memory counts as the same.
    """
    if before is None:
        return True
    old, new = (
        (one.spec, one.reference, one.machine.device, one.may_trace, one.speed_key) for one in (before, request)
    )
    if old != new:
        return True
    memory = [(one.free_bytes, *(gpu.memory_free_bytes for gpu in one.machine.gpus)) for one in (before, request)]
    if keeps_memory and before.free_bytes is not None:
        return False
    return len(memory[0]) != len(memory[1]) or any(
        old_bytes != new_bytes
        and (old_bytes is None or new_bytes is None or abs(new_bytes - old_bytes) >= MOVED_SHARE * old_bytes)
        for old_bytes, new_bytes in zip(*memory, strict=True)
    )


def request_for(
    next_run: NextRun, machine: Machine, snapshot: Snapshot | None, *, may_trace: bool, speed_key: SpeedKey = ()
) -> PredictionRequest:
    """Return the request for the next run, with the memory that is free by the newest sample."""
    tick = snapshot.tick if snapshot is not None else None
    reference = next_run.reference_spec()
    spec, free_bytes = spec_on(machine, next_run), None
    machine = machine.used_by(next_run.spec.knobs["devices"])
    if tick is not None:
        live_run = snapshot.live_run if snapshot is not None else None
        machine, free_bytes = _with_free_memory(machine, tick, live_run), _host_free_bytes(tick, live_run)
    return PredictionRequest(spec, machine, free_bytes, may_trace, reference, speed_key)


def spec_on(machine: Machine, next_run: NextRun) -> RunSpec:
    """Return the spec with the number of devices on this machine.

    They are unchanged if the devices are refused, which the run's start reports.
    """
    from trainfast_runner.settings.device_counts import with_devices

    spec = next_run.spec
    try:
        return with_devices(spec, machine.used_by(spec.knobs["devices"]))
    except UserError:
        return spec


def _host_free_bytes(tick: Tick, live_run: RunSnapshot | None) -> int | None:
    """Return the free memory of the host in bytes; the memory of a live run is free again when the next one starts."""
    host = tick.host
    if host.memory_available_bytes is None:
        return None
    run_bytes = host.run.memory_rss_bytes if live_run is not None and host.run is not None else None
    return host.memory_available_bytes + (run_bytes or 0)


def _with_free_memory(machine: Machine, tick: Tick, live_run: RunSnapshot | None) -> Machine:
    """Return the machine with the memory that its GPUs have free now, or had before the live run."""
    readings = {device.uuid: device for device in tick.devices if device.uuid}
    before = live_run.run_file.used_before_bytes if live_run is not None and live_run.run_file is not None else {}
    gpus = []
    for gpu in machine.gpus:
        reading = readings.get(gpu.uuid or "")
        if reading is not None and reading.memory_free_bytes is not None:
            used, used_before = reading.memory_used_bytes, before.get(gpu.uuid or "")
            run_bytes = max(0, used - used_before) if used is not None and used_before is not None else 0
            gpu = replace(gpu, memory_free_bytes=reading.memory_free_bytes + run_bytes)
        gpus.append(gpu)
    return dataclasses.replace(machine, gpus=tuple(gpus))


NO_TRACE_NOW = "no prediction: a trace would slow the run"


class Predictor:
    """Posts `NextRunPredicted` about the newest request; a trace is given up for the settings of another model."""

    def __init__(self, post: Post, python: TrainingPython, home: Home) -> None:
        self._post, self._python, self._home = post, python, home
        self._work = CancellableWork("predict")
        self._lock = threading.Lock()
        """Held while the two fields below change."""
        self._newest: PredictionRequest | None = None
        self._traced_key = ""
        """The key of the model that is being traced; empty without one."""
        self._failures: dict[str, UserError] = {}
        """The reason a model cannot be traced, by its key."""
        self._speed_model: tuple[object, DeviceSpeedModel] | None = None
        """The newest speed model, with the key of all that it was made for."""

    def request(self, request: PredictionRequest) -> None:
        """Answer this request from now on. Returns at once."""
        with self._lock:
            self._newest = request
            if self._traced_key and request.may_trace and _key(request) == self._traced_key:
                return  # the trace under way is for this model
        self._work.start(self._answer_newest, self._post, ThreadFailed)

    def cancel(self, wait_s: float = 0.0) -> None:
        """End the trace under way and wait at most `wait_s` seconds until its process is gone."""
        self._work.cancel(wait_s)

    def _answer_newest(self, cancelled: threading.Event) -> NextRunPredicted | None:
        answer, answered = None, None
        while answered is not self._newest and not cancelled.is_set():
            assert self._newest is not None
            answered = self._newest
            answer = self._answer(answered, cancelled)
        return None if cancelled.is_set() else answer

    def _answer(self, request: PredictionRequest, cancelled: threading.Event) -> NextRunPredicted | None:
        """Return the prediction or the reason there is none; None if the trace for it was given up."""
        from trainfast_runner.machine.training_python import ProgramCancelled
        from trainfast_runner.memory.tracing import cached_model

        spec, reference, machine = request.spec, request.reference, request.machine
        try:
            model = cached_model(spec, machine.device, self._python)
            if model is None and not request.may_trace and _key(request) not in self._failures:
                return NextRunPredicted(NextRunMemory(reason=NO_TRACE_NOW))
            model = model or self._trace(request, cancelled)
            reference_model = reference_bytes = None
            if reference is not None:
                reference_model = cached_model(reference, machine.device, self._python)
                reference_bytes = _peak_bytes(reference_model, reference, machine)
            memory = NextRunMemory(predicted_fit(model, request), spec, reference_bytes=reference_bytes)
            return NextRunPredicted(memory, self._predict_speed(request, model, reference_model))
        except ProgramCancelled:
            return None
        except (UserError, OSError) as error:
            words = error.message if isinstance(error, UserError) else str(error)
            return NextRunPredicted(NextRunMemory(reason=f"no prediction: {words}", failed=True))

    def _trace(self, request: PredictionRequest, cancelled: threading.Event) -> MemoryModel:
        """Return the traced model of this request, with the state of the trace posted meanwhile.

        Raises UserError for a model that cannot be traced, and ProgramCancelled once the trace is given up.
        """
        from trainfast_runner.machine.training_python import ProgramCancelled
        from trainfast_runner.memory.tracing import TraceProgress, trace_model

        machine, key, since_ns, shown_words = request.machine, _key(request), time.monotonic_ns(), ""
        if key in self._failures:
            raise self._failures[key]
        with self._lock:
            if cancelled.is_set():
                raise ProgramCancelled
            self._traced_key = key

        def show(tracing: TraceProgress) -> None:
            nonlocal shown_words
            waits = f"waiting for {tracing.waits_for}" if tracing.waits_for else "tracing the model"
            words = importing_words(tracing.importing) or waits
            if words != shown_words:
                shown_words = words
                self._post(NextRunPredicted(NextRunMemory(reason=f"{words}…", since_ns=since_ns)))

        show(TraceProgress(0, 0))
        gpus = [gpu.uuid for gpu in machine.gpus if gpu.uuid]
        try:
            return trace_model(request.spec, machine.device, self._python, cancelled, gpus, show)
        except UserError as error:
            self._failures[key] = error
            raise
        finally:
            with self._lock:
                self._traced_key = ""

    def _predict_speed(
        self, request: PredictionRequest, model: MemoryModel, reference_model: MemoryModel | None
    ) -> NextRunSpeed | None:
        """Predict the speed from earlier runs, with that of the reference where its model is known; None if unknown."""
        from trainfast_runner.search.predicted_speed import UnknownSpeed
        from trainfast_runner.settings.device_counts import device_count

        machine, reference = request.machine, request.reference
        try:
            speeds = self._speed_model_for(request)
            predicted = speeds.predict(request.spec, device_count(request.spec, machine), model)
            if isinstance(predicted, UnknownSpeed):
                return None
            if reference is None or reference_model is None:
                return NextRunSpeed(predicted)
            speeds = self._speed_model_for(replace(request, spec=reference))
            before = speeds.predict(reference, device_count(reference, machine), reference_model)
        except (UserError, OSError):
            return None
        return NextRunSpeed(predicted, None if isinstance(before, UnknownSpeed) else before.median)

    def _speed_model_for(self, request: PredictionRequest) -> DeviceSpeedModel:
        """Return the speed model of the request's training and device, made anew when `speed_key` changes."""
        from trainfast_runner.search.predicted_speed import SpeedDevice, speed_model_on, training_of
        from trainfast_runner.settings.device_counts import first_gpu_name

        spec, machine = request.spec, request.machine
        device = SpeedDevice(machine.used_by(spec.knobs["devices"]).device, first_gpu_name(spec, machine) or "")
        key = (training_of(spec), device, request.speed_key)
        if self._speed_model is None or self._speed_model[0] != key:
            self._speed_model = key, speed_model_on(self._home, spec, device, self._python)
        return self._speed_model[1]


def _key(request: PredictionRequest) -> str:
    """Return everything that a trace depends on, as a text."""
    from trainfast_runner.memory.tracing import request_fields

    return repr(request_fields(request.spec, request.machine.device))


def predicted_fit(model: MemoryModel, request: PredictionRequest) -> PredictedFit:
    """Predict this spec on this machine. Raises UserError for settings unknown to the model."""
    from trainfast_runner.machine.resource_limits import free_within_limits
    from trainfast_runner.memory.headroom import predict_headroom
    from trainfast_runner.settings.device_counts import world_size

    spec, machine = request.spec, request.machine
    free_bytes = None if request.free_bytes is None else free_within_limits(request.free_bytes)
    return predict_headroom(model, spec, machine, world_size(spec, machine), free_bytes)


def _peak_bytes(model: MemoryModel | None, spec: RunSpec, machine: Machine) -> int | None:
    """Predict the peak of another spec; None without a model, and if it cannot run on this machine."""
    from trainfast_runner.settings.device_counts import first_gpu_name, world_size

    if model is None:
        return None
    try:
        ranks = world_size(spec, machine)
        return model.corrected_for(first_gpu_name(spec, machine)).predict(spec, ranks).total_bytes
    except UserError:
        return None


SCRIPT_NOT_PREDICTED = (
    f"the memory of a script is not predicted; {key_of('main', 'batch')} finds its largest batch by trials"
)


class BackgroundWork:
    """Works in threads of its own, and gives way to everything that is measured."""

    def __init__(self, home: Home, post: Post, python: TrainingPython) -> None:
        self._post, self._python = post, python
        self.predictor = Predictor(post, python, home)
        self.memory: NextRunMemory | None = None
        self.speed: NextRunSpeed | None = None
        """The newest prediction; None without one."""
        self.is_shown = True
        """False while a screen covers the predictions."""
        self._newest_request: PredictionRequest | None = None
        """The newest request of a prediction; none follows that asks for the same."""
        self.situation: Situation | None = None
        """The advisor's facts about the next run's model; None while none are known."""
        self._situation_key: tuple[str, str] | None = None
        """The preset and the model of the newest request for facts."""
        self.oom_explainer = OomExplainer(post, python)
        self._home = home
        self._standby_key: tuple[object, ...] = ()
        """The next run that the standby was made for; empty while the device is used, as a run has taken it."""

    def stop(self, wait_s: float) -> None:
        """End all work, and wait at most this long for each trace's process to end."""
        self.predictor.cancel(wait_s)
        self.oom_explainer.cancel(wait_s)
        from trainfast_runner.machine.warm_python import WARM

        WARM.close(waits=False)

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
        if next_run is not None and machine is not None and next_run.script is None and not is_device_used:
            self.gather_situation(next_run.spec, machine)
        self._keep_standby(next_run, machine, run, is_device_used=is_device_used)
        self.oom_explainer.explain_if_oom(run, may_trace=not is_device_used)
        if next_run is not None and next_run.script is not None:
            # A script has no model to trace before it runs.
            self.predictor.cancel()
            self.memory, self.speed, self._newest_request = NextRunMemory(reason=SCRIPT_NOT_PREDICTED), None, None
        elif next_run is not None and machine is not None:
            if machine.used_by(next_run.spec.knobs["devices"]).device == "cuda":
                # The trace has memory of its own on the GPU, which a run would take for another process's.
                may_trace = not is_device_used
            else:
                # A trace during the start of a run is that run's own prediction.
                is_measured = run is not None and run.is_live and run.state != "starting"
                may_trace = running_search is None and not has_other_live_run and not is_measured
            has_result = run is not None and run.result is not None
            speed_key = (run.run_id if run is not None else "", has_result, running_search)
            request = request_for(next_run, machine, snapshot, may_trace=may_trace, speed_key=speed_key)
            # While the device is used, free memory moves with the run or search that uses it.
            keeps_memory = is_device_used or not self.is_shown
            if asks_anew(request, self._newest_request, keeps_memory=keeps_memory):
                self._newest_request = request
                self.predictor.request(request)

    def _keep_standby(
        self, next_run: NextRun | None, machine: Machine | None, run: RunSnapshot | None, *, is_device_used: bool
    ) -> None:
        """Keep a standby for the next run of a preset while nothing is timed: its imports take all of a core."""
        if is_device_used or next_run is None or machine is None or next_run.script is not None:
            self._standby_key = ()
            return
        ranks = run.run_file.world_size if run is not None and run.run_file is not None else 1
        knobs = next_run.spec.knobs
        key = (next_run.spec.name, repr(next_run.spec.model), knobs["strategy"], knobs["devices"], ranks)
        if key != self._standby_key:
            self._standby_key = key
            start_thread("standby", partial(_keep_standby, next_run.spec, self._home, self._python, ranks), self._post)

    def gather_situation(self, spec: RunSpec, machine: Machine) -> None:
        """Have the advisor's facts gathered, unless they were for this preset and model: posts SituationGathered."""
        key = (spec.name, repr(spec.model))
        if key != self._situation_key:
            self.situation, self._situation_key = None, key
            start_thread("advice", partial(_gather, key, spec, machine, self._python), self._post)

    def note_situation(self, message: SituationGathered) -> None:
        """Keep the facts; those of an earlier request are dropped."""
        if message.key == self._situation_key:
            self.situation = message.situation

    def fit_words(self, machine: Machine | None, snapshot: Snapshot | None) -> Callable[[RunSpec], str]:
        """Return a function to the parameters of a spec and its largest batch here, by an earlier trace; else to ""."""
        from trainfast_runner.memory.tracing import cached_models

        if machine is None:
            return lambda spec: ""
        model_of = cached_models(machine.device, self._python)

        def words(spec: RunSpec) -> str:
            if (model := model_of(spec)) is None:
                return ""
            request = request_for(NextRun(spec, dict(spec.knobs)), machine, snapshot, may_trace=False)
            try:
                most = predicted_fit(model, request).max_batch
            except UserError:  # it cannot run here as it is
                return ""
            return f"{model.parameters / 1e6:,.0f}M{'' if most is None else f', fits up to {count(most)}'}: "

        return words

    def fit(self, next_run: NextRun, machine: Machine | None) -> PredictedFit | None:
        """Return the next run's prediction; None while the newest one is about other settings."""
        memory = self.memory
        if memory is None or machine is None or memory.spec != spec_on(machine, next_run):
            return None
        return memory.fit


def _keep_standby(spec: RunSpec, home: Home, python: TrainingPython, known_ranks: int) -> None:
    """Keep a standby for a run like this; for several ranks, which take more memory, only once there was such a run."""
    from trainfast_runner.running import launch, planning

    with suppress(UserError):  # the start of the run reports it
        plan = planning.plan_run(spec, python)
        if plan.world_size in (1, known_ranks):
            launch.keep_standby(plan, home)


def _gather(key: tuple[str, str], spec: RunSpec, machine: Machine, python: TrainingPython) -> SituationGathered:
    from trainfast_runner.search.advice import gather

    return SituationGathered(key, gather(spec, machine, python))
