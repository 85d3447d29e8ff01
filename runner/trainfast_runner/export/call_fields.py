"""Arguments that settings go into, of a call in a script or of a command."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from trainfast_runner.settings.knob_type import KnobValues
from trainfast_runner.settings.other_tools.from_knobs import trainer_fields

TRAINER_CALLS = (
    "TrainingArguments",
    "Seq2SeqTrainingArguments",
    "SFTConfig",
    "DPOConfig",
    "GRPOConfig",
    "RewardConfig",
)
"""transformers' class and those of TRL that inherit its fields."""


@dataclass(frozen=True)
class CallFields:
    """Functions by name, and values for their arguments."""

    functions: tuple[str, ...]
    fields: dict[str, object]
    defaults: dict[str, object] = field(default_factory=dict)
    """Values that are the function's own defaults: such a value replaces another one, and is not added."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Other names under which an argument may stand."""
    order: tuple[str, ...] = ()
    """The names of the first arguments, which may be given without them."""
    displaced: dict[str, str] = field(default_factory=dict)
    """The argument beside which the function refuses another one: `{"batch_size": "batch_sampler"}`."""

    def name_in(self, name: str, names: Container[str]) -> str:
        """The name under which an argument stands among `names`; else its own."""
        alias = self.aliases.get(name)
        return alias if alias is not None and alias in names else name

    def is_added(self, name: str) -> bool:
        """True if the argument has to be written where it does not stand yet."""
        return name not in self.defaults or self.defaults[name] != self.fields[name]


def trainer_call(knobs: KnobValues) -> CallFields:
    """The call of TrainingArguments, or of a class that inherits its fields, with these knobs."""
    fields = trainer_fields(knobs)
    if knobs.get("compile") == "off":
        fields["torch_compile"] = False
    if knobs.get("workers") == 0:
        fields["dataloader_prefetch_factor"] = None
    defaults: dict[str, object] = {
        "gradient_accumulation_steps": 1,
        "bf16": False,
        "fp16": False,
        "tf32": False,
        "gradient_checkpointing": False,
        "torch_compile": False,
        "dataloader_num_workers": 0,
        "dataloader_prefetch_factor": None,
    }
    return CallFields(TRAINER_CALLS, fields, defaults, {"gradient_checkpointing": "activation_checkpointing"})
