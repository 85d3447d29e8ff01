"""Settings that cannot work together, refused before launch with both named and the nearest that do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainfast_runner.combinations.data_rules import DATA_RULES
from trainfast_runner.combinations.facts import Facts, Rule
from trainfast_runner.combinations.general_rules import GENERAL_RULES, devices_exist
from trainfast_runner.combinations.pipeline_rules import pipeline_fits
from trainfast_runner.combinations.sharded_rules import SHARDED_RULES, several_gpus
from trainfast_runner.combinations.technique_rules import TECHNIQUE_RULES
from trainfast_runner.combinations.zero_rules import zero_fits
from trainfast_runner.problem import Problem

if TYPE_CHECKING:
    from trainfast_runner.hardware.machine import Machine
    from trainfast_runner.settings.spec import RunSpec

RULES: tuple[Rule, ...] = (
    *GENERAL_RULES,
    pipeline_fits,
    *SHARDED_RULES,
    zero_fits,
    *DATA_RULES,
    *TECHNIQUE_RULES,
)

DEVICE_RULES: tuple[Rule, ...] = (devices_exist, several_gpus)
"""Those of RULES that ask for nothing but devices."""


def check(facts: Facts) -> None:
    """Raise the first rule's Problem that applies; return when the combination can run."""
    for rule in RULES:
        problem = rule(facts)
        if problem is not None:
            raise problem


def cannot_run_here(spec: RunSpec, machine: Machine) -> Problem | None:
    """The refusal of a run for which this machine has not the devices; None where it has them."""
    facts = Facts(spec, machine, config={}, versions={}, python="")
    return next((problem for rule in DEVICE_RULES if (problem := rule(facts)) is not None), None)
