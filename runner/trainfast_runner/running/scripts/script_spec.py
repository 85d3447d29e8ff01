"""The plan of any spec: of a preset's model, or of a script of the user's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from trainfast_runner.running.planning import RunPlan, plan_run
from trainfast_runner.running.scripts.script_plan import plan_script
from trainfast_runner.settings.knob_values import KnobValue
from trainfast_runner.settings.knobs import knob
from trainfast_runner.settings.spec import RunSpec


def plan_spec(spec: RunSpec, python: str | None = None) -> RunPlan:
    """Check a spec against this machine. Raises UserError."""
    if spec.script is None:
        return plan_run(spec, python)
    return plan_script((), typed_settings(spec.knobs, spec.overrides), preset=spec.script, python=python)


def typed_settings(knobs: Mapping[str, KnobValue], overrides: Iterable[str]) -> list[str]:
    """The overrides of a script's knobs, as they are typed after `--set`."""
    return [f"{name}={knob(name).text_of(knobs[name])}" for name in overrides]
