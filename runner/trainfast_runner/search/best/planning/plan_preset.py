"""Plan a best-fit search of a preset, or by `plan_script` of a script: its question, checked against this machine."""

from __future__ import annotations

import dataclasses

import msgspec

from trainfast_runner.running import planning
from trainfast_runner.search.best.global_batch import default_global_batch
from trainfast_runner.search.best.planning.best_plan import BestPlan, global_batch_of, question_of
from trainfast_runner.search.best.planning.plan_script import plan_script_best
from trainfast_runner.search.best.planning.request import BestRequest, check_request
from trainfast_runner.search.best.planning.varied import vary_of
from trainfast_runner.search.best.survey.base import Survey
from trainfast_runner.search.best.survey.model_survey import ModelSurvey
from trainfast_runner.search.candidate_spec import MESH_KNOBS, candidate_spec
from trainfast_runner.search.journal.best import Space
from trainfast_runner.search.options import SearchOptions
from trainfast_runner.settings.device_counts import chosen_gpus, device_count
from trainfast_runner.settings.spec import RunSpec, expand_paths
from trainfast_runner.settings.typed_settings import settings_of


def plan_spec_best(spec: RunSpec, request: BestRequest, options: SearchOptions, python: str | None = None) -> BestPlan:
    """Check a question about a preset or a script against this machine. Raises UserError; starts nothing."""
    if spec.script is None:
        return plan_preset_best(spec, request, options, python)
    return plan_script_best(spec.script, settings_of(spec.knobs, spec.overrides), request, options, python)


def plan_preset_best(
    spec: RunSpec, request: BestRequest, options: SearchOptions, python: str | None = None
) -> BestPlan:
    """Check a question against this machine and the training Python. Raises UserError; starts nothing.

    Without a global batch the preset's own is kept, so that the training stays the same, unless the batch is varied.
    """
    spec = dataclasses.replace(spec, data=expand_paths(spec.data))
    # `devices` is a ceiling: the preset's own run may use fewer.
    plan = planning.plan_run(candidate_spec(spec, {}), python)
    check_request(request, plan)
    survey = ModelSurvey(spec, plan)
    preset_batch = default_global_batch(spec, survey.machine)
    vary, left_alone = vary_of(spec, request.vary, survey.machine, request.global_batch or preset_batch, survey.refuse)
    question = question_of(
        spec,
        plan,
        request,
        vary=vary,
        left_alone=left_alone,
        global_batch=global_batch_of(request, preset_batch),
        limits_bytes=list(plan.memory_limit_bytes or ()),
    )
    space = survey.space(question)
    uuids = _gpus_of(survey, space)
    if uuids:
        baseline_spec = candidate_spec(spec, {})
        plan = planning.plan_run(baseline_spec, python, uuids[: device_count(baseline_spec, survey.machine)])
        survey = ModelSurvey(spec, plan)
        question = msgspec.structs.replace(question, device_uuids=uuids, device_names=plan.device_names)
    return BestPlan(question, survey, space)


def _gpus_of(survey: Survey, space: Space) -> list[str]:
    """Return the UUIDs of the GPUs for the whole search: those of the candidate that uses most; empty on a CPU."""
    if survey.machine.device != "cuda":
        return []
    specs = [candidate_spec(survey.spec, {}), *survey.legal_specs(space).values()]
    meshes = {tuple(spec.knobs[name] for name in MESH_KNOBS): spec for spec in specs}
    widest = max(meshes.values(), key=lambda spec: device_count(spec, survey.machine))
    return [gpu.uuid for gpu in chosen_gpus(widest.knobs, survey.machine).gpus if gpu.uuid]
