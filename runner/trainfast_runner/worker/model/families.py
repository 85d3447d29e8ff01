"""The objectives that a family of models has a head for, and its kind where it has none.

Read from the source of transformers' tables, whose module would import torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..invalid import InvalidInput

TABLE_OF_OBJECTIVE = {
    "causal-lm": "CAUSAL_LM",
    "masked-lm": "MASKED_LM",
    "sequence-classification": "SEQUENCE_CLASSIFICATION",
    "seq2seq": "SEQ_TO_SEQ_CAUSAL_LM",
    "image-classification": "IMAGE_CLASSIFICATION",
}
"""NAME of transformers' table of heads for each objective, `MODEL_FOR_NAME_MAPPING_NAMES`."""
SOUND_KINDS = ("speech", "audio")
"""Kinds whose heads for text are a decoder alone."""
TABLES_OF_KIND = {
    "speech": r"SPEECH_\w+|CTC|RNNT|TDT|TEXT_TO_SPECTROGRAM",
    "audio": r"AUDIO_\w+|TEXT_TO_WAVEFORM",
    "object detection": r"(ZERO_SHOT_)?OBJECT_DETECTION",
    "segmentation": r"\w+_SEGMENTATION|MASK_GENERATION|IMAGE_MATTING",
    "video": r"VIDEO_\w+",
    "depth estimation": r"(DEPTH|NORMAL|POINTMAP)_ESTIMATION",
    "keypoint": r"KEYPOINT_\w+|POSE_ESTIMATION",
    "time series": r"TIME_SERIES_\w+",
    "vision-language": r"IMAGE_TEXT_TO_TEXT|VISION_2_SEQ|VISUAL_\w+|DOCUMENT_\w+|\w+_RECOGNITION|ZERO_SHOT_IMAGE_\w+",
    "vision": r"IMAGE|IMAGE_TO_IMAGE|\w+_IMAGE_MODELING|BACKBONE",
}
"""NAMEs of the tables of each kind that no objective trains; the first kind with a table of the family is its own."""
FIELDS_OF_KIND = {
    "audio": {"audio_config", "audio_encoder_config", "sampling_rate", "num_mel_bins"},
    "vision-language": {"vision_config"},
    "vision": {"image_size", "patch_size"},
}
"""Fields of a configuration that show its kind where no table has the family."""


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


def trainable_families() -> set[str]:
    """Return the families with a head for an objective; empty if they are unknown."""
    tables = _families_of_tables()
    families = {family for name in TABLE_OF_OBJECTIVE.values() for family in tables.get(name, ())}
    return {family for family in families if _kind_of_tables(family) not in SOUND_KINDS}


def check_family(config: Any, objective: str) -> None:
    """Raise InvalidInput for a family of another kind, or without a head for the objective, naming those it has."""
    tables, family = _families_of_tables(), config.model_type
    heads = [name for name, table in TABLE_OF_OBJECTIVE.items() if family in tables.get(table, ())]
    kind = _kind_of_tables(family)
    if "causal-lm" not in heads and (kind is None or heads):
        kind = next((kind for kind, fields in FIELDS_OF_KIND.items() if fields & vars(config).keys()), kind)
    if tables and (kind in SOUND_KINDS or not heads):
        refusal = f"{kind} models are not supported, and {family} is one" if kind else f"{family} has no head to train"
        supported = "text models (gpt2, llama, bert, t5) and image classifiers (vit, resnet) are supported"
        raise InvalidInput(f"{refusal}; {supported}", key="model")
    if heads and objective not in heads:
        raise InvalidInput(f"{family} has no {objective} head", key="data.objective", allowed=heads, nearest=heads[0])


def _kind_of_tables(family: str) -> str | None:
    """Return the kind of the first table that has the family; None if none has it."""
    tables = _families_of_tables()
    for kind, pattern in TABLES_OF_KIND.items():
        if any(family in families for name, families in tables.items() if re.fullmatch(pattern, name)):
            return kind
    return None
