"""Published figures of a preset that are comparable to a run: measured with its model and sequence length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainfast_runner.settings.presets import Preset, Variant
from trainfast_runner.settings.spec import RunSpec, from_preset


def published_for(preset: Preset, variant: Variant, spec: RunSpec) -> tuple[Mapping[str, Any], str]:
    """A variant's published figures; none and the reason when `spec` has another model or seq_len."""
    if not variant.published:
        return {}, ""
    published_spec = from_preset(preset, variant)
    names = dict.fromkeys([*published_spec.model, *spec.model])
    differ = [f"model.{name}" for name in names if published_spec.model.get(name) != spec.model.get(name)]
    differ += ["seq_len"] if published_spec.knobs["seq_len"] != spec.knobs["seq_len"] else []
    if not differ:
        return variant.published, ""
    verb = "differs" if len(differ) == 1 else "differ"
    return {}, f"Published figures are left out: {' and '.join(differ)} {verb} from the published run."
