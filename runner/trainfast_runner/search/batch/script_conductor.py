"""The batch search of a user's own script: each size is tried in a process of its own, under the memory limit.

A script has no warm process, so a probe is an ordinary run of a few steps. The peaks of the probes so far predict the
memory of all other sizes.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec

from trainfast_runner.running.planning import RunPlan
from trainfast_runner.search.batch.batch_plan import SCRIPT_PROBE_STEPS, UNTIMED_SCRIPT_STEPS
from trainfast_runner.search.batch.conductor import BatchConductor
from trainfast_runner.search.batch.probe_record import probe_of_ended_run
from trainfast_runner.search.batch.script_probe_record import (
    fitting_probe,
    script_peaks,
    size_that_data_fills,
    unusable_reason,
)
from trainfast_runner.search.journal.batch import (
    BatchEnded,
    Predicted,
    RankPeaks,
)
from trainfast_runner.search.memory.fit_lines import SCRIPT_PHASE
from trainfast_runner.search.memory.limits import free_gpu_bytes
from trainfast_runner.search.script_runs import ScriptPlanner, incompatible_reason
from trainfast_runner.worker.shared.search_roles import PROBE


class ScriptBatchConductor(BatchConductor):
    """Conducts the batch search of a script."""

    _plan_script_run: ScriptPlanner
    """`conduct_batch` gives this class only plans that have one."""

    def predict(self) -> None:
        """Start with the script's own size: nothing is known of its memory yet."""
        own_batch = self._plan_script_run({}).spec.knobs.get("batch_size")
        start = own_batch if isinstance(own_batch, int) else 1
        self._write(Predicted(start=start, reason="the memory of a script is predicted from its probes"))

    def plan_size(self, batch_size: int, steps: int, timing_warmup: int) -> RunPlan:
        """Plan a probe of one size, under the limit of the search."""
        knobs = {"batch_size": batch_size, "steps": steps, "timing_warmup": timing_warmup}
        plan = self._plan_script_run(knobs)
        limits_bytes = self._plan.memory_limit_bytes
        if limits_bytes is not None:
            plan = dataclasses.replace(plan, memory_limit_bytes=limits_bytes)
        assert plan.script is not None
        script = msgspec.structs.replace(plan.script, longest_first=True)
        return dataclasses.replace(plan, script=script, search_id=self._plan.search_id)

    def probe(self, batch_size: int) -> BatchEnded | None:
        """Try one size in a process of its own, or take the ended probe that a killed conductor left."""
        began_s = self._runs.clock_s()
        plan = self.plan_size(batch_size, SCRIPT_PROBE_STEPS, UNTIMED_SCRIPT_STEPS)
        orphan = self._orphans.adopt_trying_run(plan)
        if orphan is not None:
            self._record_launch(orphan, PROBE)
        directory = orphan or self._start(plan, PROBE)
        result = self._runs.wait_for_end(directory)
        seconds = self._runs.clock_s() - began_s if orphan is None else result.seconds or 0.0
        if result.state == "oom":
            self._write(probe_of_ended_run(batch_size, result, seconds))
            return None
        filled = size_that_data_fills(result, batch_size, self._state().largest_fitted)
        failure = unusable_reason(result) or (incompatible_reason(result, ("batch_size",)) if filled is None else None)
        if failure is not None:
            return BatchEnded(state="failed", reason=failure)
        probe = fitting_probe(directory, result, filled or batch_size, seconds, free_gpu_bytes(self._plan))
        self._write(msgspec.structs.replace(probe, fills_data=filled is not None))
        return None

    def confirmed_peaks(self, directory: Path) -> list[RankPeaks]:
        """Return the peaks of each rank of a confirmation run as its limit counted them."""
        return [
            msgspec.structs.replace(peaks, peak_allocated_bytes=peaks.phase_peaks[SCRIPT_PHASE])
            for peaks in script_peaks(directory, free_gpu_bytes(self._plan))
        ]

    def nothing_fits(self, reason: str) -> BatchEnded:
        """Return the end of a search in which a batch of 1 does not fit."""
        return BatchEnded(state="nothing_fits", reason=reason)
