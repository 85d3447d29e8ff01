"""Plan the probes and trials of a script's searches, and name the knobs that the script overrode."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from trainfast_runner.errors import UserError
from trainfast_runner.records.result import Result
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.running.scripts.script_plan import plan_script
from trainfast_runner.settings.knob_values import KnobValue
from trainfast_runner.settings.knobs import knob
from trainfast_runner.settings.scripts.script_preset import ScriptPreset

ScriptPlanner = Callable[[Mapping[str, KnobValue]], RunPlan]
"""Plans the script's run with these knobs."""


def script_planner(
    preset: ScriptPreset, settings: Sequence[str], python: str | None, set_by_search: Collection[str]
) -> ScriptPlanner:
    """Return the planner of a preset's script; the knobs of `set_by_search` are left out of the settings.

    Raises UserError, also in its calls.
    """
    fixed_settings = [setting for setting in settings if setting.partition("=")[0].strip() not in set_by_search]

    def plan_script_run(knobs: Mapping[str, KnobValue]) -> RunPlan:
        knob_settings = [f"{name}={knob(name).text_of(value)}" for name, value in knobs.items()]
        plan = plan_script((), [*fixed_settings, *knob_settings], preset=preset, python=python, trial=True)
        if plan.script is not None and plan.script.hooks_blocked is not None:
            raise UserError(f"the script's steps are not seen: {plan.script.hooks_blocked}", key=preset.name)
        return plan

    return plan_script_run


def incompatible_reason(result: Result, knobs: Collection[str]) -> str | None:
    """Return the reason that a run did not have its settings: the script overrode one of these knobs; else None."""
    for override in result.script.overridden if result.script is not None else ():
        if override.knob in knobs:
            ran = "nothing shows what ran" if override.ran is None else f"{override.ran} ran"
            return f"{override.knob}={override.asked} is incompatible with the script: {ran}, by {override.by}"
    return None
