"""`run.json` as typed values: the training that this process is asked for. Standard library only."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .catalog import LEVERS
from .shared.host import states_folder
from .shared.memory_limit import limit_of_rank
from .shared.words import CONFIRMATION, PROBE, TRIAL


@dataclass(frozen=True)
class Knobs:
    """The knobs that this worker obeys, by the names of the knob table, which alone has their defaults."""

    precision: str
    batch_size: int
    grad_accum: int
    seq_len: int
    checkpointing: str
    optimizer: str
    attention: str
    compile: str
    workers: int
    pin_memory: str
    samples: str
    prefetch: int
    strategy: str
    tp_degree: int
    pp_degree: int
    pp_schedule: str
    micro_batches: int
    reshard: str
    offload_path: str | None
    """The run's own folder under the knob's, which has the states that are offloaded to a disk."""
    engine: str
    lr: float
    lr_schedule: str
    weight_decay: float
    grad_clip: float
    seed: int
    steps: int
    timing_warmup: int
    others: dict[str, Any]
    """Knobs without a field here, by name: the file that handles one reads it from here."""

    def lever(self, name: str) -> str:
        """The value of a lever's knob; the plain one in a trace that does not depend on it."""
        value = self.others.get(name, getattr(self, name, None))
        return LEVERS[name].plain if value is None else str(value)

    def with_values(self, values: dict[str, Any]) -> Knobs:
        """Return these knobs with other values, by name."""
        return knobs_of({**vars(self), **self.others, **values})


@dataclass(frozen=True)
class Data:
    """`[data]` of the preset, with every path absolute and every glob already expanded."""

    kind: str
    objective: str
    paths: list[str] = field(default_factory=list)
    tokenizer: str | None = None
    name: str | None = None
    split: str = "train"
    texts: str = "documents"
    """`lines` makes each line of a document a text of its own."""


@dataclass(frozen=True)
class RankSpec:
    """The spec of one rank. `memory_limit_bytes` is this rank's own; None without a limit."""

    model: dict[str, Any]
    data: Data
    knobs: Knobs
    device: str
    cache_dir: Path
    memory_limit_bytes: int | None
    role: str | None
    """`probe` in a process that tries batch sizes, `trial` in one that tries settings, `proof` in a batch search's
    confirmation run; None in any other."""
    search_id: str | None

    @property
    def strict_steps(self) -> int | None:
        """Number of first steps of a CPU run that are measured under strict malloc thresholds.

        None means every step: with a memory limit, and in a batch search. 0 with fewer than two warm-up steps, because
        optimizer states exist from step 2 on.
        """
        if self.memory_limit_bytes is not None or self.role in (PROBE, CONFIRMATION):
            return None
        return self.knobs.timing_warmup if self.knobs.timing_warmup >= 2 else 0


def read_spec(run_dir: Path, rank: int) -> RankSpec:
    """Read `run.json`, whose settings the launch has checked."""
    record = json.loads((run_dir / "run.json").read_text())
    role = record.get("role")
    knobs = knobs_of(record["knobs"])
    if knobs.offload_path is not None:
        knobs = dataclasses.replace(knobs, offload_path=str(states_folder(knobs.offload_path, run_dir)))
    # A trial's speed is measured without the limit: under one, every step has strict malloc thresholds.
    limits_bytes = None if role == TRIAL else record.get("memory_limit_bytes")
    return RankSpec(
        model=record["model"],
        data=Data(**record["data"]),
        knobs=knobs,
        device=record["device"],
        cache_dir=Path(record["cache_dir"]),
        memory_limit_bytes=limit_of_rank(limits_bytes, rank),
        role=role,
        search_id=record.get("search_id"),
    )


def knobs_of(values: dict[str, Any]) -> Knobs:
    """Return the knobs with these values; there is one for each knob of the knob table."""
    names = {knob.name for knob in dataclasses.fields(Knobs)}
    others = {name: value for name, value in values.items() if name not in names}
    return Knobs(**{name: values[name] for name in names - {"others"}}, others=others)
