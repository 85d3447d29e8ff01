"""The next run of a model's preset, which has a value for every knob."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from trainfast_runner.errors import UserError
from trainfast_runner.settings.knob_values import KnobValue
from trainfast_runner.settings.knobs import KNOBS_BY_NAME, knob
from trainfast_runner.settings.spec import with_setting
from trainfast_tui.next_run.next_run import NextRun

if TYPE_CHECKING:
    from trainfast_runner.machine.devices import Machine
    from trainfast_runner.search.advice.facts import Situation


@dataclass(frozen=True)
class PresetNextRun(NextRun):
    """A model's preset with its overrides."""

    def text_of(self, name: str) -> str:
        return KNOBS_BY_NAME[name].text_of(self.spec.knobs[name])

    def headings(self, names: Iterable[str]) -> dict[str, str]:
        return {name: KNOBS_BY_NAME[name].group for name in names if self.matters(name)}

    def matters(self, name: str) -> bool:
        """True if turning the knob changes anything with this strategy and this kind of data."""
        classifies_images = self.spec.data.get("objective") == "image-classification"
        return KNOBS_BY_NAME[name].applies(self.spec.knobs) and not (name == "seq_len" and classifies_images)

    def turn(self, name: str, by: int, *, around: bool = False, skipped: Container[KnobValue] = ()) -> Self:
        entry = KNOBS_BY_NAME[name]
        value = entry.turn(self.spec.knobs[name], by, around=around, skipped=skipped)
        return self.with_value(name, entry.text_of(value))

    def with_value(self, name: str, text: str) -> Self:
        """Return a copy with a typed value of the knob; a new strategy resets knobs without use. Raises UserError."""
        next_run = replace(self, spec=with_setting(self.spec, f"{knob(name).name}={text}"))
        return next_run._with_useful_knobs() if name == "strategy" else next_run

    def reset(self, name: str) -> Self:
        """Return a copy with the knob at its preset's value; that of the strategy resets knobs without use."""
        next_run = super().reset(name)
        return next_run._with_useful_knobs() if name == "strategy" else next_run

    def _with_useful_knobs(self) -> Self:
        """Return a copy in which every override that does nothing with this strategy is reset."""
        next_run = self
        for override in self.spec.overrides:
            entry = KNOBS_BY_NAME.get(override)
            if entry is not None and entry.only_with and not entry.applies(self.spec.knobs):
                next_run = next_run.reset(override)
        return next_run

    def save(self, name: str) -> Path:
        from trainfast_runner.settings.saving import save_preset

        return save_preset(name, self.spec, overwrite=True)

    def advice(self, machine: Machine | None, situation: Situation | None) -> dict[str, str]:
        if machine is None:
            return {}
        from trainfast_runner.search.advice.advisor import advise
        from trainfast_runner.search.advice.facts import Situation

        advised = advise(self.spec, self.preset_knobs, machine, situation or Situation())
        texts = {advice.knob: advice.text for advice in advised}
        shapes = texts.pop("model", None)
        if shapes is not None:
            texts["batch_size"] = " ".join(filter(None, (texts.get("batch_size"), shapes)))
        return texts

    def _ranks(self, machine: Machine) -> int | None:
        from trainfast_runner.settings.device_counts import world_size

        return world_size(self.spec, machine)

    def global_batch(self, machine: Machine | None) -> tuple[int, int] | None:
        if machine is None:
            return None
        from trainfast_runner.settings.device_counts import device_count, global_batch

        try:
            devices = device_count(self.spec, machine)
        except UserError:
            return None
        per_rank = global_batch(self.spec.knobs, 1)
        total = global_batch(self.spec.knobs, devices)
        return total, total // per_rank if per_rank else 1
