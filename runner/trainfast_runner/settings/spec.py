"""The settings one run is asked for: a preset (and variant) with every `--set` applied, each checked."""

from __future__ import annotations

import glob
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainfast_runner.errors import UserError, nearest
from trainfast_runner.records.run_file import RecordedSpec, name_of
from trainfast_runner.settings import presets
from trainfast_runner.settings.knob_values import KnobValue, KnobValues
from trainfast_runner.settings.knobs import KNOBS_BY_NAME, defaults, knob, split_setting
from trainfast_runner.settings.presets import Preset, Variant
from trainfast_runner.worker.catalog import STRATEGIES, StrategyEntry

if TYPE_CHECKING:
    from trainfast_runner.settings.script_preset import ScriptPreset


DATA_DEFAULTS = {"kind": "text", "objective": "causal-lm"}
"""Fields that `[data]` may leave out."""


@dataclass(frozen=True)
class RunSpec:
    """Model, data and every knob of one run. `overrides` names the knobs and fields set by `--set`."""

    preset: str
    variant: str | None
    title: str
    model: dict[str, Any]
    data: dict[str, Any]
    knobs: KnobValues
    overrides: tuple[str, ...] = ()
    script: ScriptPreset | None = None
    """The user's own script in place of model and data; `knobs` then has only the knobs set for it."""

    @property
    def name(self) -> str:
        """The preset as it is written on the command line."""
        return name_of(self.preset, self.variant)

    def with_overrides(self, **knobs: KnobValue) -> RunSpec:
        """Return a copy with these knobs, which count as overrides."""
        overrides = tuple(dict.fromkeys((*self.overrides, *knobs)))
        return replace(self, knobs={**self.knobs, **knobs}, overrides=overrides)

    def record_fields(self) -> dict[str, Any]:
        """The fields of its `RecordedSpec`, by name."""
        fields = {name: getattr(self, name) for name in RecordedSpec.__struct_fields__}
        return fields | {"knobs": dict(self.knobs), "overrides": list(self.overrides)}


def resolve(reference: str, settings: Iterable[str] = ()) -> RunSpec:
    """The run that `PRESET --set a=b ...` asks for. Raises UserError; touches no device and starts nothing."""
    preset, variant = presets.load(reference)
    return from_preset(preset, variant, settings)


def from_preset(preset: Preset, variant: presets.Variant | None, settings: Iterable[str] = ()) -> RunSpec:
    """A preset's run with further settings. Raises UserError for one of these."""
    data = {**DATA_DEFAULTS, **preset.data, **(variant.data if variant else {})}
    spec = RunSpec(
        preset=preset.name,
        variant=variant.id if variant else None,
        title=preset.title,
        model=preset.model_of(variant),
        data=data,
        knobs={**defaults(), **preset.knobs, **(variant.knobs if variant else {})},
    )
    for setting in settings:
        spec = with_setting(spec, setting)
    return spec


def spec_of_record(record: RecordedSpec) -> RunSpec:
    """The settings of a record; knobs that it lacks take their defaults.

    Unknown names of a newer version are left out. Raises UserError for a value that is unknown to this version.
    """
    knobs = {**defaults(), **knobs_of_record(record)}
    model = {key: presets.read_model_field(key, value) for key, value in record.model.items()}
    known_data = {key: value for key, value in record.data.items() if key in presets.DATA_KEYS}
    data = DATA_DEFAULTS | {key: presets.read_data_field(key, value) for key, value in known_data.items()}
    return RunSpec(record.preset, record.variant, record.title, model, data, knobs, tuple(record.overrides))


def knobs_of_record(record: RecordedSpec) -> KnobValues:
    """The recorded knobs that this version knows. Raises UserError for a value that it does not know."""
    return {name: KNOBS_BY_NAME[name].read(value) for name, value in record.knobs.items() if name in KNOBS_BY_NAME}


def with_setting(spec: RunSpec, setting: str) -> RunSpec:
    """`spec` with one `knob=value`, `model.FIELD=value` or `data.FIELD=value`. Raises UserError."""
    key, value = split_setting(setting, "--set", "knob=value")
    model, data, knobs = dict(spec.model), dict(spec.data), dict(spec.knobs)
    section, dot, name = key.partition(".")
    if dot and section == "model":
        if name in presets.MODEL_SOURCES:
            value = str(presets.read_model_field(name, value))
            # Another model brings its own fields, without those of the preset's: only the ones set so far stay.
            fields = (override.removeprefix("model.") for override in spec.overrides if override.startswith("model."))
            kept = {field: model[field] for field in fields if field not in presets.MODEL_SOURCES}
            # A path is taken from where the command is typed.
            model = {name: os.path.abspath(os.path.expanduser(value)) if name == "path" else value, **kept}
        else:
            model[name] = presets.read_model_field(name, read_toml_value(value))
    elif dot and section == "data":
        raw: object = value.split("+") if name == "paths" else value
        data[name] = presets.read_data_field(name, raw)
        if name == "paths" and "data.kind" not in spec.overrides and data["kind"] != "jpeg":
            data["kind"] = "files"
    elif dot:
        allowed, similar = ["KNOB", "model.FIELD", "data.FIELD"], nearest(section, ["model", "data"])
        raise UserError(f"there is no section {section!r}", key=key, allowed=allowed, nearest=similar)
    else:
        knobs[key] = knob(key).read(value.strip())
    overrides = tuple(dict.fromkeys((*spec.overrides, key)))
    return replace(spec, model=model, data=data, knobs=knobs, overrides=overrides)


def expand_paths(data: dict[str, Any]) -> dict[str, Any]:
    """`data` with `paths` as existing absolute files, globs expanded, a folder replaced by its JPEG files.

    Kind jpeg without paths stays as it is: its images are generated. Raises UserError when a path matches nothing.
    """
    kind = data["kind"]
    if kind not in ("files", "jpeg") or (kind == "jpeg" and not data.get("paths")):
        return data
    if not data.get("paths"):
        raise UserError("data.kind files needs data.paths", key="data.paths")
    files: list[str] = []
    for pattern in data["paths"]:
        expanded = os.path.expanduser(pattern)
        # A file of that very name needs no pattern: its name may hold [ or *.
        paths = [expanded] if os.path.exists(expanded) else sorted(glob.glob(expanded, recursive=True))
        if kind == "jpeg":
            paths = [path for match in paths for path in _images_below(match)]
        paths = [os.path.abspath(path) for path in paths if os.path.isfile(path)]
        if not paths:
            file_kind = "JPEG file" if kind == "jpeg" else "file"
            raise UserError(f"data.paths {pattern!r} matches no {file_kind}", key="data.paths")
        files += paths
    return {**data, "paths": list(dict.fromkeys(files))}


def _images_below(match: str) -> list[str]:
    """The file itself, or every JPEG file in a folder and its folders."""
    if not os.path.isdir(match):
        return [match]
    paths = (os.path.join(folder, name) for folder, _, names in os.walk(match) for name in names)
    return sorted(path for path in paths if path.lower().endswith((".jpg", ".jpeg")))


def read_toml_value(text: str) -> Any:
    """A number, boolean, list or quoted text as TOML reads it; anything else as text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # as in `read_toml`
        return text


def strategy_of(knobs: Mapping[str, Any]) -> StrategyEntry:
    """The catalog's entry. Raises UserError for a strategy of another version."""
    name = str(knobs["strategy"])
    if name not in STRATEGIES:
        message = f"strategy {name!r} of the run is unknown to this version"
        raise UserError(message, key="strategy", allowed=STRATEGIES)
    return STRATEGIES[name]


def strategy_or_single(knobs: Mapping[str, Any]) -> StrategyEntry:
    """The catalog's entry; a strategy of a newer version counts as one device."""
    return STRATEGIES.get(str(knobs.get("strategy")), STRATEGIES["single"])


def offload_folder(knobs: Mapping[str, Any]) -> Path | None:
    """The directory of states offloaded to a disk; None without `offload_path`, or if the strategy does not read it."""
    path = knobs.get("offload_path")
    if path is None or "offload_path" not in strategy_or_single(knobs).knobs:
        return None
    return Path(os.path.expanduser(str(path)))


SET_BY_A_SEARCH = ("steps", "timing_warmup")
"""Knobs that either search sets; commands that differ only in these continue the same search."""
SET_BY_A_BATCH_SEARCH = ("batch_size", *SET_BY_A_SEARCH)


def without_search_settings(overrides: Mapping[str, Any], role: str | None) -> dict[str, Any]:
    """Return the overrides without those that a search sets in each of its runs; all of a run without a `role`."""
    if role is None:
        return dict(overrides)
    return {
        key: value
        for key, value in overrides.items()
        if key not in SET_BY_A_SEARCH and (key, value) != ("memory_limit", None)
    }


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
