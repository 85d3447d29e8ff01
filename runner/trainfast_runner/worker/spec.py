"""`run.json` as typed values: the training that this process is asked for. Standard library only."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Knobs:
    """The knobs that this worker obeys, by the names of the knob table."""

    precision: str = "fp32"
    batch_size: int = 8
    grad_accum: int = 1
    seq_len: int = 128
    checkpointing: str = "off"
    optimizer: str = "adamw"
    attention: str = "auto"
    compile: str = "off"
    workers: int = 0
    pin_memory: str = "off"
    prefetch: int = 2
    strategy: str = "single"
    tp_degree: int = 2
    pp_degree: int = 2
    pp_schedule: str = "gpipe"
    micro_batches: int = 4
    reshard: str = "on"
    offload_path: str | None = None
    engine: str = "native"
    lr: float = 5e-5
    lr_schedule: str = "constant"
    weight_decay: float = 0.0
    grad_clip: float = 0.0
    seed: int = 0
    steps: int = 20
    timing_warmup: int = 3
    others: dict[str, Any] = field(default_factory=dict, hash=False)
    """Knobs without a field here, by name: the file that handles one reads it from here."""


@dataclass(frozen=True)
class Data:
    """`[data]` of the preset, with every path absolute and every glob already expanded."""

    kind: str = "text"
    objective: str = "causal-lm"
    paths: list[str] = field(default_factory=list)
    tokenizer: str | None = None
    name: str | None = None
    split: str = "train"
    samples: str = "packed"
    """`packed` fills every sample to `seq_len`; `documents` and `lines` are as long as they are, up to `seq_len`."""


@dataclass(frozen=True)
class RankSpec:
    """The spec of one rank. `memory_limit_bytes` is this rank's own; None without a limit."""

    run_id: str
    model: dict[str, Any]
    data: Data
    knobs: Knobs
    device: str
    cache_dir: Path
    memory_limit_bytes: int | None = None
    role: str | None = None
    """`probe` in a process that tries batch sizes, `trial` in one that tries settings, `proof` in a batch search's
    confirmation run; None in any other."""
    search_id: str | None = None

    @property
    def strict_steps(self) -> int | None:
        """First steps of a CPU run with strict malloc thresholds, whose memory is measured; None for all steps.

        None with a memory limit and in a batch search. 0 with fewer than two warm-up steps: optimizer states exist
        from step 2 on.
        """
        if self.memory_limit_bytes is not None or self.role in ("probe", "proof"):
            return None
        return self.knobs.timing_warmup if self.knobs.timing_warmup >= 2 else 0


def limit_of_rank(limits: Sequence[int] | None, rank: int) -> int | None:
    """Return the rank's own figure, or the last one if there are fewer than ranks; None without limits."""
    return limits[min(rank, len(limits) - 1)] if limits else None


def read_spec(run_dir: Path, rank: int) -> RankSpec:
    """Read `run.json`, whose settings the launch has checked."""
    raw = json.loads((run_dir / "run.json").read_text())
    knobs = _known(Knobs, raw.get("knobs", {}))
    knobs = dataclasses.replace(
        knobs, others={name: value for name, value in raw.get("knobs", {}).items() if not hasattr(knobs, name)}
    )
    data = _known(Data, raw.get("data", {}))
    # A trial's speed is measured without the limit: under one, every step has strict malloc thresholds.
    limits = (raw.get("memory_limit_bytes") or []) if raw.get("role") != "trial" else []
    return RankSpec(
        run_id=raw["run_id"],
        model=raw["model"],
        data=data,
        knobs=knobs,
        device=raw.get("device", "cpu"),
        cache_dir=Path(raw["cache_dir"]),
        memory_limit_bytes=limit_of_rank(limits, rank),
        role=raw.get("role"),
        search_id=raw.get("search_id"),
    )


def _known(kind: type[Any], raw: dict[str, Any]) -> Any:
    """Make a dataclass from the keys that it knows; absent and null values take its defaults."""
    names = {f.name for f in dataclasses.fields(kind)}
    return kind(**{key: value for key, value in raw.items() if key in names and value is not None})
