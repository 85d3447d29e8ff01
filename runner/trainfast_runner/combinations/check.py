"""Settings that cannot work together, refused before launch with both named and the nearest that do."""

from __future__ import annotations

from trainfast_runner.combinations.data_rules import DATA_RULES
from trainfast_runner.combinations.facts import Facts, Rule
from trainfast_runner.combinations.general_rules import GENERAL_RULES
from trainfast_runner.combinations.pipeline_rules import pipeline_fits
from trainfast_runner.combinations.sharded_rules import SHARDED_RULES
from trainfast_runner.combinations.technique_rules import TECHNIQUE_RULES
from trainfast_runner.combinations.zero_rules import zero_fits

RULES: tuple[Rule, ...] = (
    *GENERAL_RULES,
    pipeline_fits,
    *SHARDED_RULES,
    zero_fits,
    *DATA_RULES,
    *TECHNIQUE_RULES,
)


def check(facts: Facts) -> None:
    """Raise the first rule's Problem that applies; return when the combination can run."""
    for rule in RULES:
        problem = rule(facts)
        if problem is not None:
            raise problem
