"""The checked question of a best-fit search about any spec: about a preset's model, or a script of the user's own."""

from __future__ import annotations

from trainfast_runner.search.best.planning.best_plan import BestPlan
from trainfast_runner.search.best.planning.preset_question import plan_preset_best
from trainfast_runner.search.best.planning.request import BestRequest
from trainfast_runner.search.best.planning.script_question import plan_script_best
from trainfast_runner.search.options import SearchOptions
from trainfast_runner.settings.spec import RunSpec
from trainfast_runner.settings.typed_settings import settings_of


def plan_spec_best(spec: RunSpec, request: BestRequest, options: SearchOptions, python: str | None = None) -> BestPlan:
    """Check a question against this machine and the training Python. Raises UserError; starts nothing."""
    if spec.script is None:
        return plan_preset_best(spec, request, options, python)
    return plan_script_best(spec.script, settings_of(spec.knobs, spec.overrides), request, options, python)
