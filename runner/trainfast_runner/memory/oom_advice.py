"""Knob changes for a run that did not fit, the cheapest first, each with its savings and costs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainfast_runner.settings.knob_values import parse_bytes_per_rank
from trainfast_runner.units import mebibytes

OPTIMIZER_PHASE = "optimizer"
BATCH_PHASES = ("forward", "backward")
MODEL_PHASE = "model"
# A forward keeps dozens of tensors of the size of the one that failed; Korthikanti et al. (2022) count 34 bytes a
# token, hidden unit and layer for half precision, which is 17 tensors a layer.
ACTIVATIONS_ALIVE = 32
# Those 17, which hold an MLP of 4 hidden sizes without a gate, and what eager PyTorch keeps besides: a gated MLP's
# second branch and the norms' copies in single precision.
TENSORS_A_LAYER = 28
# The logits, their copy in single precision, the log-softmax and the gradient.
LOGIT_TENSORS = 4
# Weights, gradients and two AdamW moments in single precision.
STATE_BYTES = 16
NEGLIGIBLE = 0.05
MOST_FIXES = 3
NOT_ENOUGH = "; probably not enough alone"
COST_ORDER = (
    ("attention", "auto"),
    ("engine", "native"),
    ("optimizer", "adamw-fused"),
    ("compile", "off"),
    ("batch_size", None),
    ("precision", "bf16"),
    ("optimizer", "adamw-8bit"),
    ("optimizer", "adafactor"),
    ("precision", "bf16-pure"),
    ("checkpointing", "full"),
    ("seq_len", None),
)
"""Changes by their cost in speed or in kind, the cheapest first: from the knobs' own texts."""
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class Fix:
    """One change: `knob=value`, and in words the memory it saves and its cost in speed."""

    knob: str
    value: str
    saves: str
    costs: str


@dataclass(frozen=True)
class _Shortage:
    """A run's memory at its end, in bytes: limit, activations, and weights with states (`fixed`); None if unknown."""

    phase: str | None
    limit: float | None
    activations: float | None
    fixed: float
    parameters: int | None

    def fits(self, share: float, part: float = 1.0) -> bool | None:
        """True if this share of the activations fits in `part` of the limit; None if unknown."""
        if self.limit is None or self.activations is None:
            return None
        return self.fixed + share * self.activations <= part * self.limit

    def doubt(self, share: float) -> str:
        """The note beside a change that leaves this share of the activations; empty if it is enough or unknown."""
        return NOT_ENOUGH if self.phase == OPTIMIZER_PHASE or self.fits(share) is False else ""


def cheapest(
    knobs: Mapping[str, Any],
    device: str,
    phase: str | None = None,
    reason: str = "",
    limit_bytes: int | None = None,
    model: Mapping[str, Any] | None = None,
    most: int | None = MOST_FIXES,
) -> list[Fix]:
    """Return up to `most` fixes (None: all), those that should suffice alone first, then the least slowing.

    `phase` is where memory ran out: in the optimizer step a smaller batch frees nothing, before it the optimizer's
    states do not exist yet. `reason` is the allocator's message, from which the request's size is read, and on a GPU
    the limit. `model` may hold `parameters`, `layers`, `hidden_size` and `vocab_size`, as the worker's `actual` record.
    """
    shortage = _shortage(knobs, phase, reason, limit_bytes, model or {})
    states = _state_fixes(knobs, device, shortage)
    if phase == MODEL_PHASE:
        return states[:most]
    batch = [*_program_fixes(knobs, device), *_batch_fixes(knobs, device, shortage)]
    ordered = [*states, *batch] if phase == OPTIMIZER_PHASE else [*batch, *states]
    return sorted(ordered, key=lambda fix: NOT_ENOUGH in fix.saves)[:most]


def cost_of(fix: Fix) -> int:
    """The rank of a change by its cost, 0 the cheapest."""
    places = [
        place for place, (knob, value) in enumerate(COST_ORDER) if knob == fix.knob and value in (None, fix.value)
    ]
    return min(places, default=len(COST_ORDER))


def _shortage(
    knobs: Mapping[str, Any], phase: str | None, reason: str, limit: float | None, model: Mapping[str, Any]
) -> _Shortage:
    if limit is None and isinstance(knobs.get("memory_limit"), str):
        limit = min(parse_bytes_per_rank(knobs["memory_limit"]))
    if limit is None:
        limit = bytes_after("total capacity of", reason)
    parameters = model.get("parameters")
    fixed = float((parameters or 0) * STATE_BYTES)
    activations = _activation_bytes(knobs, model)
    if activations is None:
        request = bytes_after("allocate", reason)
        activations = None if request is None else request * ACTIVATIONS_ALIVE
    if activations is not None and limit is not None and phase in BATCH_PHASES:
        # An estimate that says it fitted is too low: it did not fit.
        activations = max(activations, limit - fixed)
    return _Shortage(phase, limit, activations, fixed, parameters)


def _activation_bytes(knobs: Mapping[str, Any], model: Mapping[str, Any]) -> float | None:
    """`batch x seq_len x (layers x 28 x hidden + 4 x vocabulary)` elements; None without the model's sizes.

    With full checkpointing a layer keeps its input alone, and one layer is whole. Masked-LM and classification heads
    of fewer outputs make it an upper bound.
    """
    sizes = [model.get(name) for name in ("layers", "hidden_size", "vocab_size")]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    layers, hidden, vocab = (int(size or 0) for size in sizes)
    tensors = layers + TENSORS_A_LAYER if knobs.get("checkpointing") == "full" else layers * TENSORS_A_LAYER
    element = 4 if knobs.get("precision") in {"fp32", "tf32"} else 2
    tokens = int(knobs.get("batch_size") or 1) * int(knobs.get("seq_len") or 1)
    return float(tokens * (tensors * hidden * element + LOGIT_TENSORS * vocab * 4))


def bytes_after(words: str, reason: str) -> float | None:
    """The size in bytes after these words in an allocator's message; None without the words."""
    found = re.search(rf"{words} (\d[\d.]*) ?(bytes|KiB|MiB|GiB)", reason)
    return float(found[1].rstrip(".")) * UNITS[found[2]] if found else None


def _program_fixes(knobs: Mapping[str, Any], device: str) -> list[Fix]:
    """Fixes that make the process itself smaller. On a GPU that is memory of the host, which is not the limit.

    Measured with tiny-llama on a CPU: the Trainer 25 to 28 MiB, the compiler 60 to 114 MiB, whatever the batch.
    """
    if device != "cpu":
        return []
    fixes = []
    if knobs.get("engine") == "trainer":
        fixes.append(Fix("engine", "native", "frees what the Trainer keeps besides, some 26 MiB", "about none"))
    if knobs.get("compile") not in (None, "off"):
        words = "frees what the compiler keeps in the process, 60 MiB and more"
        fixes.append(Fix("compile", "off", words, "what compiling would gain after its long first step"))
    return fixes


def _batch_fixes(knobs: Mapping[str, Any], device: str, shortage: _Shortage) -> list[Fix]:
    """Changes that shrink activations, cheapest first."""
    fixes = []
    if knobs.get("attention") == "eager":
        fixes.append(
            Fix("attention", "auto", "frees the score matrices of every layer, where the model has sdpa", "faster")
        )
    batch, accumulation = int(knobs.get("batch_size") or 1), int(knobs.get("grad_accum") or 1)
    if batch > 1:
        smaller = _smaller_batch(batch, shortage)
        fixes.append(
            Fix(
                "batch_size",
                str(smaller),
                f"activations to {_percent(smaller / batch)}{shortage.doubt(smaller / batch)}",
                f"little; grad_accum={accumulation * batch // smaller} keeps the global batch",
            )
        )
    if knobs.get("precision") in {"fp32", "tf32"}:
        words = f"frees about half of the activations{shortage.doubt(0.6)}"
        fixes.append(Fix("precision", "bf16", words, _bf16_speed(device)))
    if knobs.get("checkpointing") == "off":
        saves = f"activations to one layer plus boundaries{shortage.doubt(0.4)}"
        fixes.append(Fix("checkpointing", "full", saves, "20-30 % slower"))
    seq_len = int(knobs.get("seq_len") or 8)
    if seq_len > 64:
        saves = f"activations to 50 %{shortage.doubt(0.5)}"
        fixes.append(Fix("seq_len", str(seq_len // 2), saves, "none; but it is another task"))
    return fixes


def _bf16_speed(device: str) -> str:
    return "slower on most CPUs" if device == "cpu" else "faster on tensor cores (Ampere and later)"


def _state_fixes(knobs: Mapping[str, Any], device: str, shortage: _Shortage) -> list[Fix]:
    """Changes that shrink optimizer states, gradients and weights, cheapest first, without negligible ones."""
    found: list[tuple[Fix, float]] = []
    optimizer = str(knobs.get("optimizer"))
    if shortage.phase != MODEL_PHASE:
        if optimizer in {"adamw", "adamw-foreach"} and shortage.phase not in BATCH_PHASES:
            words = "frees 4 bytes a parameter at the optimizer's peak"
            found.append((Fix("optimizer", "adamw-fused", words, "faster"), 4))
        if optimizer.startswith("adamw") and optimizer != "adamw-8bit":
            found.append((Fix("optimizer", "adamw-8bit", "frees 6 bytes a parameter", "about none"), 6))
            found.append((Fix("optimizer", "adafactor", "frees nearly 8 bytes a parameter", "slower to converge"), 8))
    if knobs.get("precision") != "bf16-pure":
        words = "frees half of weights, gradients and states"
        speed = f"{_bf16_speed(device)}; updates lose precision"
        found.append((Fix("precision", "bf16-pure", words, speed), STATE_BYTES / 2))
    return [_sized(fix, each, shortage) for fix, each in found if not _negligible(each, shortage)]


def _negligible(bytes_a_parameter: float, shortage: _Shortage) -> bool:
    """True if the change frees too little to matter before the optimizer step."""
    if shortage.phase not in BATCH_PHASES or shortage.limit is None or shortage.parameters is None:
        return False
    return shortage.parameters * bytes_a_parameter < NEGLIGIBLE * shortage.limit


def _sized(fix: Fix, bytes_a_parameter: float, shortage: _Shortage) -> Fix:
    """The fix with the bytes it frees in all, if the parameters are known."""
    if shortage.parameters is None:
        return fix
    freed = shortage.parameters * bytes_a_parameter
    words = f"{fix.saves}, {mebibytes(freed)}"
    if shortage.phase in BATCH_PHASES and shortage.limit is not None and shortage.activations is not None:
        needed = shortage.fixed + shortage.activations - shortage.limit
        words += NOT_ENOUGH if freed < needed else ""
    return replace(fix, saves=words)


def _smaller_batch(batch: int, shortage: _Shortage) -> int:
    """The largest smaller power of two whose estimate fits in half the limit; the next one if nothing is known."""
    smaller = 1 << ((batch - 1).bit_length() - 1)
    while smaller > 1 and shortage.fits(smaller / batch, part=0.5) is False:
        smaller //= 2
    return smaller


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.2g} %"
