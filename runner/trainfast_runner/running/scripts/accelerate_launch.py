"""The ranks that `accelerate launch` starts: by its options, else its configuration file, else one on each GPU.

The rules are those of accelerate's `_validate_launch_command` and `launch_command` (accelerate/commands/launch.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from trainfast_runner.records.regular_files import read_regular

DISTRIBUTED_OPTIONS = ("multi_gpu", "use_deepspeed", "use_fsdp", "use_megatron_lm", "tpu", "mpirun_hostfile")
DISTRIBUTED_TYPES = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA")
"""Values of `distributed_type` that start several ranks, beside those that begin with MULTI_ and name a GPU."""


@dataclass(frozen=True)
class AccelerateLaunch:
    """The ranks asked for."""

    process_count: int | None
    """None for one on each GPU."""
    is_distributed: bool | None
    """None if the ranks are launched distributed only on several GPUs."""
    uses_deepspeed: bool = False
    """True if the configuration file asks for DeepSpeed."""

    def ranks(self, gpus: int) -> int:
        """Return the number of ranks on a machine with `gpus` visible GPUs: 1 unless they are launched distributed."""
        count = gpus if self.process_count is None else self.process_count
        is_distributed = count > 1 and gpus > 1 if self.is_distributed is None else self.is_distributed
        return max(1, count) if is_distributed else 1


def read_accelerate_launch(options: Sequence[str], process_count: int | None, cwd: str) -> AccelerateLaunch:
    """Return the ranks by the words before the script, which name `process_count`, or None if they name none.

    An unreadable configuration file is taken for none: accelerate itself refuses it.
    """
    values = dict(_options_with_next_word(options))
    is_on_cpu = "cpu" in values
    is_distributed: bool | None = any(option in values for option in DISTRIBUTED_OPTIONS) or None
    config = _config(os.path.join(cwd, values["config_file"]) if values.get("config_file") else None, is_on_cpu)
    uses_deepspeed = False
    if config is not None:
        kind = str(config.get("distributed_type", "NO"))
        uses_deepspeed = kind == "DEEPSPEED"
        if is_distributed is None:
            is_distributed = kind in DISTRIBUTED_TYPES or (kind.startswith("MULTI_") and kind != "MULTI_CPU")
        configured_processes = config.get("num_processes", 1)
        if process_count is None and isinstance(configured_processes, int):
            process_count = configured_processes
    if is_on_cpu and "mpirun_hostfile" not in values:
        is_distributed = False
    return AccelerateLaunch(process_count, is_distributed, uses_deepspeed)


def _options_with_next_word(options: Sequence[str]) -> list[tuple[str, str]]:
    """Each option with the word after it, which is its value where it takes one. accelerate reads - and _ alike."""
    option_values = []
    for word, next_word in zip(options, (*options[1:], ""), strict=False):
        if word.startswith("--"):
            option, equals, value = word[2:].partition("=")
            option_values.append((option.replace("-", "_"), value if equals else next_word))
    return option_values


def _config(path: str | None, is_on_cpu: bool) -> dict[str, Any] | None:
    """Return the configuration file's table; with no `path` the default file's, which --cpu ignores."""
    if path is None and is_on_cpu:
        return None
    try:
        table = yaml.safe_load(read_regular(path or _default_config()).decode("utf-8-sig"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None
    return table if isinstance(table, dict) else None


def _default_config() -> str:
    """Return the path of `accelerate config`'s file, by the variables that accelerate reads."""
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.path.expanduser(os.environ.get("HF_HOME", os.path.join(cache, "huggingface")))
    return os.path.join(home, "accelerate", "default_config.yaml")
