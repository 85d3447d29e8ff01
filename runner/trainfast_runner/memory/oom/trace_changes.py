"""Trace the memory of changes that may make a run fit which ran out of memory."""

from __future__ import annotations

import threading
from collections.abc import Generator
from typing import TYPE_CHECKING

from trainfast_runner.machine.worker_programs import ProgramCancelled
from trainfast_runner.memory.oom.explain import OutOfMemory
from trainfast_runner.memory.oom.explain_run import explain_run, models_of
from trainfast_runner.memory.oom.knob_changes import Settings, combined_settings, knob_changes_of_run, single_settings
from trainfast_runner.memory.oom.predicted_changes import is_enough, spec_with
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.settings.spec import RunSpec, spec_of_record

if TYPE_CHECKING:
    from trainfast_runner.memory.warm_tracer import WarmTracer


def trace_changes(
    oom_run: OutOfMemory,
    python: str | None = None,
    cancelled: threading.Event | None = None,
    tracer: WarmTracer | None = None,
) -> Generator[int]:
    """Trace the run's model with each change of a knob, and with several changes if no single one is enough.

    `python` traces, None for the one that trained; `tracer` is a tracing process to use.

    Yields the number of remaining traces before each. Ends early once `cancelled` is set. Raises UserError when the
    training Python cannot be asked.
    """
    run, phase = oom_run.run, oom_run.phase
    if run.script is not None:
        return
    spec = spec_of_record(run)
    python = python or run.python or None
    applicable = knob_changes_of_run(run, spec.knobs, phase)
    try:
        singles = different_specs(spec, single_settings(applicable, phase))
        yield from _trace([spec, *singles], run, python, cancelled, tracer)
        if not _is_cured(oom_run, python):
            shorter = [{change.knob: change.value} for change in applicable if change.knob == "seq_len"]
            others = different_specs(spec, [*combined_settings(applicable), *shorter])
            yield from _trace(others, run, python, cancelled, tracer)
    except ProgramCancelled:
        return


def different_specs(spec: RunSpec, changes: list[Settings]) -> list[RunSpec]:
    """Return the specs with each of these settings, without refused and equal ones."""
    specs: list[RunSpec] = []
    for settings in changes:
        changed = spec_with(spec, settings)
        if changed is not None and changed != spec and changed not in specs:
            specs.append(changed)
    return specs


def _trace(
    specs: list[RunSpec],
    run: RunFile,
    python: str | None,
    cancelled: threading.Event | None,
    tracer: WarmTracer | None,
) -> Generator[int]:
    # Imported late: the tracer is needed only for a run that ran out of memory.
    from trainfast_runner.memory.tracing import cached_models, trace_models

    model_of = cached_models(run.device, python)
    untraced_specs = [spec for spec in specs if model_of(spec) is None]
    if not untraced_specs:
        return
    yield len(untraced_specs)
    traces = trace_models(untraced_specs, run.device, python, cancelled=cancelled, gpus=run.device_uuids, tracer=tracer)
    for done, _ in enumerate(traces, 1):
        if done < len(untraced_specs):
            yield len(untraced_specs) - done


def _is_cured(oom_run: OutOfMemory, python: str | None) -> bool:
    """True if a known change fits, or if there is no limit to fit into."""
    explanation = explain_run(oom_run, models_of(oom_run.run, python))
    return explanation.limit_bytes is None or any(map(is_enough, explanation.changes))
