"""From `[model]` of a preset to a transformers configuration. Only configurations are read, never weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .invalid import InvalidInput, unknown_name

SOURCES = ("family", "path", "hub")
# Accepted by every configuration though not among its stored fields.
EXTRA_FIELDS = frozenset({"num_labels"})


def resolve_config(model: dict[str, Any]) -> Any:
    """The configuration that `model` describes, its own fields overridden by every other key.

    Raises InvalidInput for a family, a directory, a Hub id or a field that does not exist.
    """
    given = [key for key in SOURCES if key in model]
    if len(given) != 1:
        raise InvalidInput(
            f"[model] needs exactly one of {', '.join(SOURCES)}, and has {', '.join(given) or 'none'}",
            "model",
            SOURCES,
        )
    source, where = given[0], str(model[given[0]])
    base = _from_family(where) if source == "family" else _from_files(source, where)
    overrides = {key: value for key, value in model.items() if key not in SOURCES}
    allowed = field_names(base)
    for name in overrides:
        if name not in allowed:
            raise unknown_name(f"field of {base.model_type}'s configuration", name, f"model.{name}", allowed)
    try:
        if source == "family":
            return type(base)(**overrides)
        # The stored file, not `base`: fields derived from overridden ones (head_dim) must be derived again.
        stored, _ = type(base).get_config_dict(where)
        return type(base).from_dict({**stored, **overrides})
    except Exception as error:  # transformers raises its own dataclass errors, ValueError, TypeError, KeyError...
        blamed = next((name for name in overrides if f"'{name}'" in str(error)), None)
        reason = " ".join(str(error).split())
        raise InvalidInput(
            f"{base.model_type} does not accept this configuration: {reason}",
            f"model.{blamed}" if blamed else "model",
        ) from error


def field_names(config: Any) -> set[str]:
    """Every field a preset may override: the stored ones and their aliases."""
    private = {"transformers_version", "model_type", "_name_or_path"}
    return (set(config.to_dict()) | set(config.attribute_map) | EXTRA_FIELDS) - private


def _from_family(family: str) -> Any:
    from transformers import CONFIG_MAPPING

    if family not in CONFIG_MAPPING:
        raise unknown_name("model family of this transformers", family, "model.family", CONFIG_MAPPING.keys())
    return CONFIG_MAPPING[family]()


def _from_files(source: str, where: str) -> Any:
    from transformers import AutoConfig

    if source == "path" and not (Path(where) / "config.json").is_file():
        raise InvalidInput(f"{where} has no config.json", "model.path")
    try:
        return AutoConfig.from_pretrained(where, trust_remote_code=False)
    except Exception as error:
        reason = " ".join(str(error).split())
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise InvalidInput(
            f"the configuration of {where} could not be read{offline}: {reason}", f"model.{source}"
        ) from error


def vocab_size(config: Any) -> int:
    """The number of token ids of the text part of a configuration."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(text.vocab_size)


def check_seq_len(config: Any, seq_len: int) -> None:
    """Raise InvalidInput when the model has fewer positions than `seq_len` asks for."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    positions = getattr(text, "max_position_embeddings", None)
    if positions is not None and seq_len > positions:
        raise InvalidInput(
            f"seq_len={seq_len} is more than the model's {positions} positions (max_position_embeddings)",
            "seq_len",
            [f"1 to {positions}"],
            str(positions),
        )
