"""The plan of any spec: of a preset's model, or of a script of the user's own."""

from __future__ import annotations

from trainfast_runner.running.planning import RunPlan, plan_run
from trainfast_runner.running.scripts.script_plan import plan_script
from trainfast_runner.settings.spec import RunSpec
from trainfast_runner.settings.typed_settings import settings_of


def plan_spec(spec: RunSpec, python: str | None = None) -> RunPlan:
    """Check a spec against this machine. Raises UserError."""
    if spec.script is None:
        return plan_run(spec, python)
    return plan_script((), settings_of(spec.knobs, spec.overrides), preset=spec.script, python=python)
