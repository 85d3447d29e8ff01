"""The batch search of a preset: sizes are tried in one warm process, and predicted by a trace of the model."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from trainfast_runner.errors import UserError
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.batch.conductor import BatchConductor
from trainfast_runner.search.batch.disturbances import void_by_others_reason
from trainfast_runner.search.batch.nothing_fits import explain_nothing_fits
from trainfast_runner.search.batch.predicted_size import predict_size
from trainfast_runner.search.batch.probe_record import peaks_of_run, probe_of, probe_of_ended_run
from trainfast_runner.search.conducting.run_ends import end_text, raise_if_stopped
from trainfast_runner.search.conducting.waiting import wait_until
from trainfast_runner.search.conducting.warm_process import WarmProcess
from trainfast_runner.search.journal.batch import BatchEnded, RankPeaks
from trainfast_runner.search.memory.limits import smallest_limit
from trainfast_runner.worker.shared.search_roles import PROBE

FIRST_PROBE_STEPS = {"cpu": 2, "cuda": 4}
"""Optimizer steps of a process's first probe: the optimizer's states exist from the second on, and a GPU's first steps
are slow."""
LATER_PROBE_STEPS = {"cpu": 1, "cuda": 4}
"""Optimizer steps of a process's later probes. A step under strict malloc thresholds is no faster the second time."""
EXTRA_PREDICTION_WAIT_S = 5.0
"""A search waits for its prediction as long as its first process took to be ready, and this longer."""
GPU_PREDICTION_WAIT_S = 30.0
"""A search on a GPU waits for its prediction at most this long before its first process takes the GPU."""


class PresetBatchConductor(BatchConductor):
    """Conducts the batch search of a preset."""

    def predict(self) -> None:
        """Get a warm process and a prediction before the first size is chosen: both at once on a CPU."""
        cancelled = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            prediction = pool.submit(predict_size, self._plan, cancelled)
            try:
                if self._plan.device == "cuda":
                    # The tracer's CUDA context would be missing from the memory that the warm process finds free.
                    wait_until(prediction.done, self._raise_if_cancelled, time.monotonic() + GPU_PREDICTION_WAIT_S)
                    cancelled.set()
                    prediction.result()
                began_s = self._runs.clock_s()
                process = self._ready_process()
                # A prediction saves a few sizes, so waiting about as long as for the process is worth it.
                wait_s = self._runs.clock_s() - began_s + EXTRA_PREDICTION_WAIT_S
                if process is not None:
                    wait_until(prediction.done, self._raise_if_cancelled, time.monotonic() + wait_s)
            finally:
                cancelled.set()
        if process is not None:
            limit_bytes = smallest_limit(self._plan, process.available_bytes)
            self._write(prediction.result().against(self._plan, limit_bytes))

    def probe(self, batch_size: int) -> BatchEnded | None:
        """Try one size in the warm process."""
        process = self._runs.process or self._ready_process()
        if process is None:
            return None
        is_first = not any(probe.run_id == process.directory.name for probe in self._state().probes)
        steps = (FIRST_PROBE_STEPS if is_first else LATER_PROBE_STEPS)[self._plan.device]
        began_ns = time.monotonic_ns()
        replies = process.probe(batch_size, steps)
        seconds = (time.monotonic_ns() - began_ns) / 1e9
        if replies is None:
            # No rank answered: an error other than an OOM, or the run was killed, by the kernel or from outside.
            result = self._runs.wait_for_process_end()
            raise_if_stopped(result)
            if result.state != "oom":
                return BatchEnded(state="failed", reason=end_text(result))
            self._write(probe_of_ended_run(batch_size, result, seconds))
            return None
        void_reason = None
        if self._plan.device == "cuda":
            uuids = self._plan.device_uuids
            void_reason = void_by_others_reason(process.directory, replies, process.pids, uuids, began_ns)
        self._write(probe_of(self._state(), batch_size, process.directory.name, seconds, replies, void_reason))
        if any(line.outcome == "oom" for line in replies.values()):
            self._runs.wait_for_process_end()
        elif self._plan.spec.knobs["compile"] != "off":
            # A compiled step of another size is another program, with memory of its own.
            self._runs.end_process()
        return None

    def plan_size(self, batch_size: int, steps: int, timing_warmup: int) -> RunPlan:
        """Plan an ordinary run of one size."""
        spec = self._plan.spec.with_overrides(batch_size=batch_size, steps=steps, timing_warmup=timing_warmup)
        return replace(self._plan, spec=spec)

    def confirmed_peaks(self, directory: Path) -> list[RankPeaks]:
        """Return the highest peaks of each rank of a confirmation run."""
        return peaks_of_run(directory)

    def nothing_fits(self, reason: str) -> BatchEnded:
        """Return the end of a search in which a batch of 1 does not fit."""
        return explain_nothing_fits(self._plan, self._home, self._state(), reason, self._raise_if_cancelled)

    def _ready_process(self) -> WarmProcess | None:
        """Start the warm process and return it once all ranks are ready; None if it ended before, which is recorded."""
        process = self._runs.start_process(self._plan, PROBE)
        self._record_launch(process.directory, PROBE)
        if process.ready() is not None:
            return process
        result = self._runs.wait_for_process_end()
        raise_if_stopped(result)
        if result.state != "oom":
            raise UserError(end_text(result), key=result.run_id, exit_code=4)
        # Without a batch there is nothing smaller to try: the model itself does not fit.
        self._write(probe_of_ended_run(1, result, result.seconds or 0.0, phase="model"))
        return None
