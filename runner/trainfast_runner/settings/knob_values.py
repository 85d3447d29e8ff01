"""The kinds of values a knob takes: how their text is read, stepped through and described."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from trainfast_runner.errors import UserError, nearest
from trainfast_runner.units import CPU, cpu_processes, gpu_indexes

TYPE_NAMES = {int: "a whole number", float: "a number", str: "text"}
KnobValue = int | float | str | None

BYTE_UNITS = {
    "B": 1,
    **{unit: 1000**power for power, unit in enumerate(("kB", "MB", "GB", "TB"), 1)},
    **{unit: 1024**power for power, unit in enumerate(("KiB", "MiB", "GiB", "TiB"), 1)},
}
UNIT_SPELLINGS = {
    **{unit.lower(): unit for unit in BYTE_UNITS},
    **{unit.lower()[:length]: unit for unit in BYTE_UNITS if unit.endswith("iB") for length in (1, 2)},
}
"""The unit of each spelling in lower case; a letter alone is binary, as docker takes it and nvidia-smi counts."""
BYTES_FORM = "bytes with a unit: 1536m, 1536MiB, 2g, 2GiB (binary), 1.5GB (decimal)"
MAX_BYTES = 2**62
"""More memory than any machine has, and still a number of 64 bits."""
QUOTED_CHARACTERS = 40
"""The most characters of a wrong value that an error repeats."""
MAX_LIST_CHARACTERS = 200
"""The longest list of figures that an error proposes to join."""
MAX_CPU_PROCESSES = 8
"""Ranks of a run on the CPU."""


class Choice(msgspec.Struct, frozen=True):
    """One of a fixed list of words."""

    options: tuple[str, ...]

    def read(self, raw: object) -> str:
        if isinstance(raw, bool) and {"on", "off"} <= set(self.options):
            raw = "on" if raw else "off"
        if not isinstance(raw, str):
            raise UserError(f"must be a name, not {raw!r}", allowed=self.options)
        word = raw.strip()
        if word not in self.options:
            parts = word.split("+")
            reordered = next((option for option in self.options if sorted(option.split("+")) == sorted(parts)), None)
            are_values = reordered is None and len(parts) > 1 and all(part in self.options for part in parts)
            message = (
                f"{' and '.join(parts)} do not work together" if are_values else f"{word!r} is not one of its values"
            )
            raise UserError(message, allowed=self.options, nearest=reordered or nearest(word, self.options))
        return word

    def ladder(self, current: KnobValue) -> Sequence[KnobValue]:
        return self.options

    def describe(self) -> str:
        return " ".join(self.options)


class Real(msgspec.Struct, frozen=True):
    """A number from `low` to `high` without unit; `stops` are those of the arrows."""

    low: float
    high: float
    stops: tuple[float, ...]
    kind: ClassVar[type[float]] = float
    form: ClassVar[str] = "g"

    def read(self, raw: object) -> float:
        number = _number(raw, self.kind)
        if not self.low <= number <= self.high:
            raise UserError(f"{number:{self.form}} is out of range", allowed=[self.describe()])
        return number

    def ladder(self, current: KnobValue) -> Sequence[KnobValue]:
        with_current = [self.kind(current)] if isinstance(current, int | float) else []
        return sorted({*self.stops, *with_current})

    def describe(self) -> str:
        return f"{TYPE_NAMES[self.kind]} from {self.low:{self.form}} to {self.high:{self.form}}"


class Whole(Real, frozen=True):
    """A whole number from `low` to `high`."""

    kind = int
    form = "d"


class BytesPerRank(msgspec.Struct, frozen=True):
    """Bytes with a unit, one value for every rank or one a rank joined by `+`; None is no limit."""

    stops: tuple[str, ...]

    def read(self, raw: object) -> str | None:
        if raw in (None, "none", "auto"):
            return None
        if not isinstance(raw, str):
            raise UserError(f"{raw!r} needs a unit", allowed=[self.describe()])
        parse_bytes_per_rank(raw)
        return "+".join("".join(_amount_and_unit(part)) for part in raw.split("+"))

    def ladder(self, current: KnobValue) -> Sequence[KnobValue]:
        stops: list[KnobValue] = [None, *self.stops]
        if current in stops or not isinstance(current, str):
            return stops
        if "+" in current:
            return [*stops, current]
        return [None, *sorted([*self.stops, current], key=parse_bytes)]

    def describe(self) -> str:
        return f"{BYTES_FORM}, or one a rank: 2GiB+1536MiB; none"


class DeviceSelection(msgspec.Struct, frozen=True):
    """A count (`2`), a list of indexes (`0+1`, `0+`), or the CPU (`cpu`, `cpu:4`); None lets the strategy choose.

    With `always_list` a bare number is an index, not a count, and the CPU is not a value.
    """

    always_list: bool = False

    def read(self, raw: object) -> int | str | None:
        if raw in (None, "auto"):
            return None
        if isinstance(raw, bool) or not isinstance(raw, int | str):
            raise UserError(f"{raw!r} is neither a count nor a list", allowed=[self.describe()])
        text = str(raw).strip()
        if self.always_list and text in {"", "none"}:
            return ""
        if not self.always_list and text.lower().startswith(CPU):
            return _cpu(text)
        indexes = gpu_indexes(text)
        if indexes is None:
            raise UserError(f"{text[:QUOTED_CHARACTERS]!r} is neither a count nor a list", allowed=[self.describe()])
        if len(set(indexes)) != len(indexes):
            raise UserError(f"{text!r} names a device twice", allowed=[self.describe()])
        if "+" not in text and not self.always_list:
            if indexes[0] < 1:
                raise UserError("a count of devices starts at 1", allowed=[self.describe()])
            return indexes[0]
        return "+".join(map(str, indexes)) + ("+" if len(indexes) == 1 and not self.always_list else "")

    def ladder(self, current: KnobValue) -> Sequence[KnobValue]:
        stops: list[KnobValue] = [None] if self.always_list else [None, 1, 2, 4, 8, CPU]
        return stops if current in stops else [*stops, current]

    def describe(self) -> str:
        if self.always_list:
            return "device indexes joined by + such as 0+1, none, auto"
        return "a count such as 2, indexes such as 0+1 or 0+, cpu, cpu:N, auto"


class FreeText(msgspec.Struct, frozen=True):
    """Free text of this `form`; without `stops`, which are those of the arrows, also None."""

    form: str = "a path"
    stops: tuple[str, ...] = ()

    def read(self, raw: object) -> str | None:
        if raw in (None, "none", "auto") and not self.stops:
            return None
        if not isinstance(raw, str) or not raw or "\0" in raw:
            raise UserError(f"must be {self.form}", allowed=[self.describe()])
        return raw

    def ladder(self, current: KnobValue) -> Sequence[KnobValue]:
        return list(dict.fromkeys([*self.stops, current]))

    def describe(self) -> str:
        return self.form if self.stops else f"{self.form}; none"


Values = Choice | Real | BytesPerRank | DeviceSelection | FreeText
"""The values of one knob.

`read` makes a typed value of TOML or of the command line's text, or raises UserError without a key; `ladder` has the
values that the arrows step through, the current one among them; `describe` is the allowed values in a few words.
"""


def _cpu(text: str) -> str:
    """`cpu`, or `cpu:N` for N processes. Raises UserError with the nearest of them."""
    allowed = [CPU, f"{CPU}:1 to {CPU}:{MAX_CPU_PROCESSES}"]
    if text == CPU:
        return CPU
    processes = cpu_processes(text)
    if processes is None:
        raise UserError(f"{text[:QUOTED_CHARACTERS]!r} is not cpu or cpu:N", allowed=allowed, nearest=CPU)
    count = min(max(1, processes), MAX_CPU_PROCESSES)
    if count != processes:
        raise UserError(f"{text} asks for {processes} processes on the CPU", allowed=allowed, nearest=f"{CPU}:{count}")
    return f"{CPU}:{count}"


def parse_bytes(text: str) -> int:
    """Bytes of a figure with a unit: binary (`2GiB`, `2g`) or decimal (`1.5GB`). Raises UserError without a unit."""
    amount, unit = _amount_and_unit(text)
    size = float(amount) * BYTE_UNITS[unit]
    if size < 1:
        raise UserError(f"{text!r} leaves no memory at all")
    if size > MAX_BYTES:
        raise UserError(f"{amount[:QUOTED_CHARACTERS]} {unit} is more than any machine has")
    return int(size)


def _amount_and_unit(text: str) -> tuple[str, str]:
    """Return the figure as typed and its unit by its name in `BYTE_UNITS`. Raises UserError without a unit."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)", text.strip())
    unit = UNIT_SPELLINGS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise UserError(f"{text!r} is not a number of bytes with a unit", allowed=[BYTES_FORM])
    return match[1], unit


def parse_bytes_per_rank(text: str) -> list[int]:
    """`2GiB` gives one figure for every rank, `2GiB+1536MiB` one for each. Raises UserError without units."""
    if "," in text and len(text) < MAX_LIST_CHARACTERS:
        joined = "+".join(part.strip() for part in text.split(","))
        raise UserError(f"{text!r}: figures of several ranks are joined by +", nearest=joined)
    return [parse_bytes(part) for part in text.split("+")]


def bytes_of_ranks(limit: KnobValue, ranks: int) -> tuple[int, ...] | None:
    """Return the bytes of each rank that a `memory_limit` gives; None without a limit. Raises UserError."""
    if not isinstance(limit, str):
        return None
    figures = parse_bytes_per_rank(limit)
    return tuple(figures * ranks if len(figures) == 1 else figures)


def tightest_limit_bytes(knobs: Mapping[str, KnobValue]) -> int | None:
    """Return the bytes of the rank with the least `memory_limit`; None without a limit. Raises UserError."""
    limit = knobs.get("memory_limit")
    return min(parse_bytes_per_rank(limit)) if isinstance(limit, str) else None


def _number(raw: object, kind: type[float]) -> float:
    """An int or float from TOML or text; underscores as in TOML; raises UserError."""
    refusal = UserError(f"must be {TYPE_NAMES[kind]}, not {raw!r}")
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        raise refusal
    try:
        number = kind(raw.strip() if isinstance(raw, str) else raw)
    except (ValueError, OverflowError):
        # A whole number may be larger than any float.
        raise refusal from None
    if kind is int and isinstance(raw, float):
        raise refusal
    return number


KnobValues = dict[str, KnobValue]
"""A value for each knob, by its name."""


def whole_number(knobs: Mapping[str, Any], name: str) -> int:
    """Return the value of a knob that takes whole numbers."""
    return int(str(knobs[name]))


class Equivalent(msgspec.Struct, frozen=True):
    """Names of the same setting in other tools, joined by ` / ` where it is made up of several; empty without one.

    Dots join a key of DeepSpeed's JSON to the sections before it.
    """

    training_args: str = ""
    accelerate: str = ""
    deepspeed: str = ""
    torchrun: str = ""

    @property
    def trainer_fields(self) -> tuple[str, ...]:
        """The fields of TrainingArguments that make up the setting; empty for a variable or prose."""
        return tuple(name for name in self.training_args.split(" / ") if name.isidentifier() and name.islower())


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
    """The strategies, or values of the knob `obeyed_by`, that obey the knob; empty for all."""
    obeyed_by: str = "strategy"
    equivalent_values: tuple[KnobValue, ...] | Literal["all"] = "all"
    """The values that train the same at one global batch; empty if no two do."""
    changes_in_warm_process: bool = False
    """True if a warm process can turn it, except to or from one of `needs_new_process_for`."""
    needs_new_process_for: tuple[KnobValue, ...] = ()
    search_values: tuple[KnobValue, ...] = ()
    """Values that a best-fit search varies unless told otherwise; empty if it does not vary the knob."""
    min_gpus: int = 0
    """With fewer GPUs in the machine the knob does nothing."""

    @property
    def training(self) -> str:
        """Help text: the values that train the same."""
        if self.equivalent_values == "all":
            return "every value trains the same at one global batch"
        if self.equivalent_values:
            return f"{', '.join(map(str, self.equivalent_values))} train alike; another value trains differently"
        return "another value trains differently"

    def keeps_training(self, before: KnobValue, after: KnobValue) -> bool:
        """True if `after` trains the same as `before` at one global batch."""
        return before == after or self.equivalent_values == "all" or {before, after} <= set(self.equivalent_values)

    def needs_process(self, value: KnobValue) -> bool:
        """True if only a new process can take this value."""
        return not self.changes_in_warm_process or value in self.needs_new_process_for

    def applies(self, knobs: Mapping[str, KnobValue]) -> bool:
        """True if another value can change anything in a run with these knobs."""
        return not self.only_with or knobs[self.obeyed_by] in self.only_with

    def read(self, raw: object) -> KnobValue:
        """A typed value; raises UserError naming this knob."""
        try:
            return self.values.read(raw)
        except UserError as error:
            message, allowed = f"{self.name}: {error.message}", error.allowed or [self.values.describe()]
            raise UserError(message, key=self.name, allowed=allowed, nearest=error.nearest) from None

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
