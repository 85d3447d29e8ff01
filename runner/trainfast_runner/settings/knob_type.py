"""A knob: one setting of a run, the values it takes and its help."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, Literal

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.settings.knob_values import DeviceSelection, KnobValue, Values

KnobValues = dict[str, KnobValue]
"""A value for each knob, by its name."""


def whole_number(knobs: Mapping[str, Any], name: str) -> int:
    """Return the value of a knob that takes whole numbers."""
    return int(str(knobs[name]))


class Equivalent(msgspec.Struct, frozen=True):
    """Names of the same setting in other tools; empty where a tool has none."""

    training_args: str = ""
    accelerate: str = ""
    deepspeed: str = ""
    torchrun: str = ""

    @property
    def trainer_fields(self) -> tuple[str, ...]:
        """The fields of TrainingArguments that make up the setting; empty for a variable or prose."""
        return tuple(name for name in self.training_args.split(" / ") if name.isidentifier() and name.islower())

    @property
    def trainer_field(self) -> str | None:
        """The one field of TrainingArguments that is the setting; None for several fields or none."""
        return self.trainer_fields[0] if len(self.trainer_fields) == 1 else None

    @property
    def deepspeed_keys(self) -> tuple[str, ...]:
        """The keys of DeepSpeed's JSON that make up the setting, each with its sections before it, joined by dots."""
        return tuple(key for key in self.deepspeed.split(" / ") if key)


class Knob(msgspec.Struct, frozen=True):
    """One setting. `what`, `speed`, `memory` and `training` are its help."""

    name: str
    values: Values
    default: KnobValue
    group: str
    what: str
    speed: str = "none"
    memory: str = "none"
    same_as: Equivalent = msgspec.field(default_factory=Equivalent)
    only_with: tuple[str, ...] = ()
    """The strategies that obey the knob; empty for all."""
    equivalent_values: tuple[KnobValue, ...] | Literal["all"] = ()
    """The values that train the same at one global batch."""
    changes_in_warm_process: bool = False
    """True if a warm process can turn it, except to or from one of `needs_new_process_for`."""
    needs_new_process_for: tuple[KnobValue, ...] = ()
    search_values: tuple[KnobValue, ...] = ()
    """Values that a best-fit search varies unless told otherwise; empty if it does not vary the knob."""

    @property
    def training(self) -> str:
        """Help text: the values that train the same."""
        if self.equivalent_values == "all":
            return "every value trains the same at one global batch"
        if self.equivalent_values:
            return f"{', '.join(map(str, self.equivalent_values))} train alike; another value trains differently"
        return "another value trains differently"

    @property
    def has_equivalent_values(self) -> bool:
        """True if some values train the same, so that the knob changes speed and memory alone."""
        return bool(self.equivalent_values)

    def keeps_training(self, before: KnobValue, after: KnobValue) -> bool:
        """True if `after` trains the same as `before` at one global batch."""
        return before == after or self.equivalent_values == "all" or {before, after} <= set(self.equivalent_values)

    def needs_process(self, value: KnobValue) -> bool:
        """True if only a new process can take this value."""
        return not self.changes_in_warm_process or value in self.needs_new_process_for

    def applies(self, knobs: Mapping[str, KnobValue]) -> bool:
        """True if another value can change anything in a run with these knobs."""
        return not self.only_with or knobs["strategy"] in self.only_with

    def read(self, raw: object) -> KnobValue:
        """A typed value; raises UserError naming this knob."""
        try:
            return self.values.read(raw)
        except UserError as error:
            raise UserError(
                f"{self.name}: {error.message}",
                key=self.name,
                allowed=error.allowed or [self.values.describe()],
                nearest=error.nearest,
            ) from None

    def turn(
        self, current: KnobValue, by: int, *, around: bool = False, skipped: Container[KnobValue] = ()
    ) -> KnobValue:
        """The value `by` stops further along the ladder without `skipped`, held at its ends or `around` them."""
        ladder = [value for value in self.values.ladder(current) if value == current or value not in skipped]
        index = (ladder.index(current) if current in ladder else 0) + by
        return ladder[index % len(ladder) if around else max(0, min(len(ladder) - 1, index))]

    def text_of(self, value: KnobValue) -> str:
        """A value as it is typed after `--set name=`."""
        if value is None:
            return "auto" if isinstance(self.values, DeviceSelection) else "none"
        if not isinstance(value, float):
            return str(value)
        short_text = f"{value:g}"
        return short_text if float(short_text) == value else repr(value)

    def toml_value(self, value: KnobValue) -> KnobValue:
        """A value as a preset has it: TOML has no null."""
        return self.text_of(value) if value is None else value
