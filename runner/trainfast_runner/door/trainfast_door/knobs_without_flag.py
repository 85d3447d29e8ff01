"""Set the knobs that the script has no flag for.

Overwrite fields of TrainingArguments, even those that the script sets, and change DataLoader's defaults, which the
script's own arguments override.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from .blocked_saves import sandbox_fields
from .notes import never_raises, note

if TYPE_CHECKING:
    from .script_run import ScriptRun


def set_trainer_fields(module: Any, run: ScriptRun) -> None:
    """Set the fields asked for before `TrainingArguments.__post_init__` of `transformers.training_args` reads them."""
    fields = run.settings.trainer_fields
    sandbox = sandbox_fields(run)
    if not fields and not sandbox:
        return
    arguments = module.TrainingArguments
    post_init = arguments.__post_init__

    @functools.wraps(post_init)
    def with_fields(self: Any) -> None:
        set_fields(self)
        post_init(self)

    @never_raises
    def set_fields(self: Any) -> None:
        for name, value in fields.items():
            if hasattr(self, name):
                setattr(self, name, value)
            else:
                note(f"TrainingArguments has no field {name} in this version of transformers")
        for name, value in sandbox.items():
            # Versions differ in their fields.
            given_value = getattr(self, name, value)
            if given_value != value:
                setattr(self, name, value)
                if given_value:
                    run.suppress(f"{name}={given_value}")

    arguments.__post_init__ = with_fields


@never_raises
def set_loader_defaults(loader_class: Any, run: ScriptRun) -> None:
    """Change the defaults of `DataLoader`'s arguments; an argument that the script gives wins."""
    new_defaults = run.settings.loader_defaults
    init = loader_class.__init__
    if not new_defaults or not init.__defaults__:
        return
    names = [
        parameter.name
        for parameter in inspect.signature(init).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.default is not parameter.empty
    ]
    values = dict(zip(names, init.__defaults__))  # noqa: B905 (Python 3.8 has no strict)
    init.__defaults__ = tuple(
        {**values, **{name: new_defaults[name] for name in names if name in new_defaults}}.values()
    )
