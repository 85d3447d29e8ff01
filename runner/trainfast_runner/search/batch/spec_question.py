"""The question of a batch search about any spec: about a preset's model, or a script of the user's own."""

from __future__ import annotations

from trainfast_runner.search.batch.batch_plan import BatchPlan
from trainfast_runner.search.batch.preset_question import plan_preset_batch
from trainfast_runner.search.batch.script_question import plan_script_batch
from trainfast_runner.search.options import BatchSearchOptions
from trainfast_runner.settings.spec import RunSpec
from trainfast_runner.settings.typed_settings import settings_of


def plan_spec_batch(spec: RunSpec, python: str | None, options: BatchSearchOptions) -> BatchPlan:
    """Return the checked plan of a batch search. Raises UserError."""
    if spec.script is None:
        return plan_preset_batch(spec, python, options)
    return plan_script_batch(spec.script, settings_of(spec.knobs, spec.overrides), python, options)
