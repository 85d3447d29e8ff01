"""The transformers configuration that `[model]` of a preset describes. Weights are never read."""

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..invalid import InvalidInput, one_line, unknown_name
from ..shared.words import longest_seq_len, positions_needed

SOURCE_KEYS = ("family", "path", "hub")
"""Keys of `[model]` that name its configuration: each model has exactly one."""
EXTRA_FIELDS = frozenset({"num_labels"})
"""Fields that every configuration takes, although it does not store them."""
FREE_IMAGE_SIZE = 224
"""Side in pixels of images for a model that takes any size, as in the ImageNet recipe of the loader."""
POSITIVE_FIELDS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
"""Fields of a configuration that must be positive."""
COUNT_FIELD = re.compile(r"(.*_)?(layers|depths?|experts|blocks)|n_layer")
"""Names of fields that count parts of a model, each of which is built: `num_hidden_layers`, `n_routed_experts`."""
MOST_COUNTED, LARGEST_SIZE = 2_000, 2**31 - 1
"""Chosen, not measured: the most of such parts, and the largest of any other size. The deepest published models have
below 1,000 layers."""


def resolve_config(model: dict[str, Any]) -> Any:
    """The configuration that `model` describes, its own fields overridden by every other key.

    Raises InvalidInput for a family, a directory, a Hub id or a field that does not exist.
    """
    source = next(key for key in SOURCE_KEYS if key in model)
    place = str(model[source])
    overrides = {key: value for key, value in model.items() if key not in SOURCE_KEYS}
    _check_largest(overrides, "model")
    base = _from_family(place) if source == "family" else _from_files(source, place)
    # The stored fields and their aliases.
    private = {"transformers_version", "model_type", "_name_or_path"}
    allowed_names = (set(base.to_dict()) | set(base.attribute_map) | EXTRA_FIELDS) - private
    for name in overrides:
        if name not in allowed_names:
            raise unknown_name(f"field of {base.model_type}'s configuration", name, f"model.{name}", allowed_names)
    _check_sizes(base, overrides)
    try:
        if source == "family":
            return type(base)(**overrides)
        # The stored file, not `base`: fields derived from overridden ones (head_dim) must be derived again.
        stored, _ = type(base).get_config_dict(place)
        return type(base).from_dict({**stored, **overrides})
    except Exception as error:  # transformers raises its own dataclass errors, ValueError, TypeError, KeyError...
        blamed = next((name for name in overrides if f"'{name}'" in str(error)), None)
        raise InvalidInput(
            f"{base.model_type} does not accept this configuration: {one_line(error)}",
            key=f"model.{blamed}" if blamed else "model",
        ) from error


def _check_largest(fields: dict[str, Any], section: str) -> None:
    """Raise InvalidInput for a size so large that building the model would not end."""
    for name, value in fields.items():
        if isinstance(value, dict):
            _check_largest(value, f"{section}.{name}")
            continue
        most = MOST_COUNTED if COUNT_FIELD.fullmatch(name) else LARGEST_SIZE
        sizes = [*value, len(value)] if isinstance(value, list) else [value]
        if (largest := max((size for size in sizes if isinstance(size, int)), default=0)) > most:
            raise InvalidInput(
                f"{section}.{name}={largest:,} is too large", key=f"{section}.{name}", allowed=[f"at most {most:,}"]
            )


def _check_sizes(base: Any, overrides: dict[str, Any]) -> None:
    """Raise InvalidInput for a size below 1, most of which transformers would take."""
    size_names = {base.attribute_map.get(name, name) for name in POSITIVE_FIELDS} | set(POSITIVE_FIELDS)
    for name, value in overrides.items():
        if name in size_names and isinstance(value, int) and value < 1:
            raise InvalidInput(
                f"{name}={value}: a size of {base.model_type} is at least 1", key=f"model.{name}", allowed=["1 or more"]
            )


def _from_family(family: str) -> Any:
    from transformers import CONFIG_MAPPING

    if family not in CONFIG_MAPPING:
        tables = _families_of_tables()
        with_head = {name for _, table in HEAD_OF_OBJECTIVE.values() for name in tables.get(table, ())}
        trainable = {name for name in with_head & set(CONFIG_MAPPING) if not _is_for_sound(name)}
        families = trainable or CONFIG_MAPPING.keys()
        raise unknown_name("model family of this transformers", family, "model.family", families)
    return CONFIG_MAPPING[family]()


def _from_files(source: str, place: str) -> Any:
    from transformers import AutoConfig

    if source == "path":
        if (Path(place) / "model_index.json").is_file():
            raise InvalidInput(f"diffusion models are not supported, and {place} is one", key="model.path")
        if not (file := Path(place) / "config.json").is_file():
            raise InvalidInput(f"{place} has no config.json", key="model.path")
        with suppress(ValueError, AttributeError):  # transformers names the mistake
            _check_largest(json.loads(file.read_text()), file.name)
    try:
        return AutoConfig.from_pretrained(place, trust_remote_code=False)
    except Exception as error:
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise InvalidInput(
            f"the configuration of {place} could not be read{offline}: {one_line(error)}", key=f"model.{source}"
        ) from error


def text_part(config: Any) -> Any:
    """The part of a configuration that describes its language model, or else the configuration itself."""
    # An encoder-decoder's text part would be a copy of its decoder without the encoder.
    if getattr(config, "is_encoder_decoder", False) or not hasattr(config, "get_text_config"):
        return config
    return config.get_text_config()


def head_size(text: Any) -> int:
    """Elements of one head of attention, by the text part of a configuration."""
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def active_share(text: Any) -> float:
    """Share of a mixture's experts that a token goes through; 1 for a model without experts."""
    experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    return (getattr(text, "num_experts_per_tok", None) or experts) / experts if experts else 1.0


def vocab_size(config: Any) -> int:
    """Number of token ids of a model that reads text."""
    return int(text_part(config).vocab_size)


def image_part(config: Any) -> Any:
    """The part of a configuration that describes its vision model, or else the configuration itself."""
    return getattr(config, "vision_config", None) or config


def image_shape(config: Any) -> tuple[int, int]:
    """Channels and side in pixels of the square images that the data loader makes for this model.

    FREE_IMAGE_SIZE for a model that takes any size. Raises InvalidInput for a model that takes no squares.
    """
    part = image_part(config)
    size = getattr(part, "image_size", None) or FREE_IMAGE_SIZE
    sides = size if isinstance(size, list | tuple) else [size]
    if len(set(sides)) > 1:
        shape = " x ".join(map(str, sides))
        raise InvalidInput(
            f"{config.model_type} reads images of {shape}, and the loader makes squares", key="data.kind"
        )
    return int(getattr(part, "num_channels", None) or 3), int(sides[0])


def patches(config: Any) -> int | None:
    """Patches of an image of the configured size; None for a model without patches, or with several sizes of them."""
    part = image_part(config)
    size, patch = getattr(part, "image_size", None), getattr(part, "patch_size", None)
    return (size // patch) ** 2 if isinstance(size, int) and isinstance(patch, int) and patch > 0 else None


def tokens_per_sample(config: Any, objective: str, seq_len: int) -> int:
    """Tokens of a sample of text, or patches and class token of an image; 0 for an image without patches."""
    if objective != "image-classification":
        return seq_len
    patch_count = patches(config)
    return 0 if patch_count is None else patch_count + 1


def check_seq_len(config: Any, objective: str, seq_len: int) -> None:
    """Raise InvalidInput if the model has no head for the objective, or too few positions for `seq_len` tokens.

    An image has none.
    """
    check_family(config, objective)
    if objective == "image-classification":
        return
    text = text_part(config)
    positions = getattr(text, "max_position_embeddings", None)
    # -1 stands for XLNet's relative positions, which have no end.
    needed_positions = positions_needed(objective, seq_len)
    if isinstance(positions, int) and 0 < positions < needed_positions:
        longest_length = longest_seq_len(objective, positions)
        raise InvalidInput(
            f"seq_len={seq_len} needs {needed_positions} positions,"
            f" and the model has {positions} (max_position_embeddings)",
            key="seq_len",
            allowed=[f"1 to {longest_length}"],
            nearest=str(longest_length),
        )


HEAD_OF_OBJECTIVE = {
    "causal-lm": ("CausalLM", "CAUSAL_LM"),
    "masked-lm": ("MaskedLM", "MASKED_LM"),
    "sequence-classification": ("SequenceClassification", "SEQUENCE_CLASSIFICATION"),
    "seq2seq": ("Seq2SeqLM", "SEQ_TO_SEQ_CAUSAL_LM"),
    "image-classification": ("ImageClassification", "IMAGE_CLASSIFICATION"),
}
"""transformers' `AutoModelForName` of each objective, and the NAME of its table, `MODEL_FOR_NAME_MAPPING_NAMES`."""
SOUND_TABLES = re.compile(r"(SPEECH|AUDIO)_\w+|CTC|RNNT|TDT|TEXT_TO_(SPECTROGRAM|WAVEFORM)")
"""NAMEs of the tables of models for sound, whose heads for text are a decoder alone."""
SOUND_FIELDS = {"audio_config", "audio_encoder_config", "sampling_rate", "num_mel_bins"}
"""Fields of a configuration that show a model for sound where no table has the family."""


@cache
def _families_of_tables() -> Mapping[str, frozenset[str]]:
    """Return the families of each table, by NAME; empty for a transformers that has its tables elsewhere."""
    package = find_spec("transformers")
    folders = package.submodule_search_locations if package is not None else None
    try:
        text = (Path((folders or [""])[0]) / "models" / "auto" / "modeling_auto.py").read_text(encoding="utf-8")
    except OSError:
        return {}
    tables = re.findall(r"^MODEL_FOR_(\w+)_MAPPING_NAMES\b[^\n]*\(\n(.*?)^\)", text, re.MULTILINE | re.DOTALL)
    return {name: frozenset(re.findall(r'\(\s*"([^"]+)",', body)) for name, body in tables}


def check_family(config: Any, objective: str) -> None:
    """Raise InvalidInput for a family of another kind, or without a head for the objective, naming those it has."""
    tables, family = _families_of_tables(), config.model_type
    heads = [name for name, (_, table) in HEAD_OF_OBJECTIVE.items() if family in tables.get(table, ())]
    has_sound = "causal-lm" not in heads and bool(SOUND_FIELDS & vars(config).keys())
    if tables and (has_sound or not heads or _is_for_sound(family)):
        supported = "text models (gpt2, llama, bert, t5) and image classifiers (vit, resnet) are"
        raise InvalidInput(f"{family} is not supported; {supported}", key="model")
    if heads and objective not in heads:
        raise InvalidInput(f"{family} has no {objective} head", key="data.objective", allowed=heads, nearest=heads[0])


def _is_for_sound(family: str) -> bool:
    tables = _families_of_tables().items()
    return any(family in families for name, families in tables if SOUND_TABLES.fullmatch(name))
