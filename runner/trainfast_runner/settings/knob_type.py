"""A knob: one setting of a run, the values it takes and its help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainfast_runner.errors import UserError
from trainfast_runner.settings.knob_values import DeviceList, KnobValue, Values

Knobs = dict[str, KnobValue]
"""A value for each knob, by its name."""


@dataclass(frozen=True)
class Equivalent:
    """Names of the same setting in other tools; empty where a tool has none."""

    training_args: str = ""
    accelerate: str = ""
    deepspeed: str = ""
    torchrun: str = ""


@dataclass(frozen=True)
class Knob:
    """One setting. `what`, `speed` and `memory` are its help."""

    name: str
    values: Values
    default: KnobValue
    group: str
    what: str
    speed: str
    memory: str
    same_as: Equivalent = field(default_factory=Equivalent)
    only_with: tuple[str, ...] = ()
    """The strategies that obey it; empty for all."""

    def applies(self, knobs: Mapping[str, KnobValue]) -> bool:
        """True if another value can change anything in a run with these knobs."""
        return not self.only_with or knobs["strategy"] in self.only_with

    def read(self, raw: object) -> KnobValue:
        """A typed value; raises UserError naming this knob."""
        try:
            return self.values.read(raw)
        except UserError as problem:
            raise UserError(
                f"{self.name}: {problem.message}",
                key=self.name,
                allowed=problem.allowed or [self.values.describe()],
                nearest=problem.nearest,
            ) from None

    def turn(self, current: KnobValue, by: int) -> KnobValue:
        """The value `by` stops further along the ladder, held at its ends."""
        ladder = list(self.values.ladder(current))
        place = ladder.index(current) if current in ladder else 0
        return ladder[max(0, min(len(ladder) - 1, place + by))]

    def show(self, value: KnobValue) -> str:
        """A value as it is typed after `--set name=`."""
        if value is None:
            return "auto" if isinstance(self.values, DeviceList) else "none"
        return f"{value:g}" if isinstance(value, float) else str(value)
