"""The typed lines of `steps.jsonl` and `events.jsonl`, and `Actual`, the settings that ran.

Times are CLOCK_MONOTONIC nanoseconds. Unknown fields are ignored, absent ones are None.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from trainfast_runner.errors import highest

# Figures outside these bounds are damage: the line counts as unreadable, and no arithmetic on it can overflow.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Bounded = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
Degree = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `steps.jsonl`: one optimizer step of one rank. Phases an engine cannot split are None.

    JSON has no NaN or infinity: such a loss is None with `loss_not_finite`. `tokens` is None for a model without
    tokens, such as one of images that are not cut into patches, whose record has 0.
    """

    t_ns: Count
    step: Count
    warmup: bool = False
    samples: Count | None = None
    """None, as `tokens`, when a user's own script does not show them."""
    tokens: Count | None = None
    loss: Bounded | None = None
    step_ms: Milliseconds
    data_ms: Bounded | None = None
    forward_ms: Bounded | None = None
    backward_ms: Bounded | None = None
    optimizer_ms: Bounded | None = None
    other_ms: Bounded | None = None
    peak_allocated_bytes: Count | None = None
    peak_reserved_bytes: Count | None = None
    alloc_retries: Count | None = None
    lr: Bounded | None = None
    loss_scale: Bounded | None = None
    compiling: bool = False
    phase_peaks: dict[str, Count] | None = None
    loss_not_finite: bool = False

    def __post_init__(self) -> None:
        if self.tokens == 0:
            msgspec.structs.force_setattr(self, "tokens", None)

    @property
    def begin_ns(self) -> int:
        """CLOCK_MONOTONIC ns at which the step began."""
        return self.t_ns - round(self.step_ms * 1e6)


class Actual(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that really ran, read from the live objects."""

    nodes: Count | None = None
    """Machines, or agents of torchrun, that the ranks were on."""

    wrapper: str | None = None
    optimizer: str | None = None
    param_dtype: str | None = None
    compute_dtype: str | None = None
    reduce_dtype: str | None = None
    attention: str | None = None
    attention_reason: str | None = None
    """The reason that `attention=auto` took this kernel; None when a kernel was asked for by name."""
    world_size: Count | None = None
    device: str | None = None
    zero_stage: Count | None = None
    mesh: dict[str, Degree] | None = None
    sequence_parallel: str | None = None
    ep_degree: Degree | None = None
    pipeline_stages: Count | None = None
    compiled: bool | None = None
    compiled_blocks: Count | None = None
    """Blocks that are compiled each by itself."""
    dropout: bool | None = None
    """True if the model's configuration has a rate of dropout above zero."""
    attention_kernel: str | None = None
    """The kernel behind transformers' function; kernels joined by `+` if layers differ."""
    float8_layers: Count | None = None
    """Layers whose matrix products are in float8."""
    kernels: str | None = None
    allocator: str | None = None
    loss_function: str | None = None
    checkpointed_layers: Count | None = None
    """Layers that compute their activations again in the backward."""
    engine: str | None = None
    optimizer_implementation: str | None = None
    optimizer_reason: str | None = None
    """The reason that an optimizer class runs which the strategy does not prefer; None for the preferred one."""
    method: str | None = None
    """`full`, `lora` or `qlora`; a script's adapters count too."""
    parameters: int | None = None
    trainable_parameters: int | None = None
    adapted_layers: list[str] | None = None
    """Names of the layers with adapters, each once for all blocks, as peft's `target_modules` takes them."""
    # As the model's configuration has them: some families keep a list here.
    layers: Any = None
    hidden_size: Any = None
    vocab_size: Any = None


class UnendedProcess(msgspec.Struct, frozen=True):
    """A process that outlived SIGKILL; `state` is the kernel's letter."""

    pid: int
    name: str
    state: str


class RunStart(msgspec.Struct, frozen=True, kw_only=True):
    """How a run's training process came to be, and what its start took."""

    kind: str = "cold"
    """`standby` for a process that had done its imports before; `cold` for a new one."""
    reason: str | None = None
    """The reason of a cold start where a standby was kept; else None."""
    seconds: dict[str, float] = {}
    """Seconds of each part of the start, in order, from the request to the end of the first step: plan (checks and
    launch), process, imports, data, model, first_step. Empty until the result is made; a part that has not ended is
    missing."""


class NodeStart(msgspec.Struct, frozen=True, kw_only=True):
    """The start of a node, as its supervisor tells it to the others."""

    host: str
    """The machine's own name."""
    address: str
    port: int | None = None
    """The port where the ranks meet (torchrun's rendezvous); node 0's only."""
    boot_id: str = ""
    monotonic_ns: int = 0
    wall_ns: int = 0
    """One instant on both clocks of the node."""


class TrainingEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a training's end that only its supervisor sees; the ranks' own records tell the rest."""

    exit_code: int | None = None
    """Exit code of the direct child, negative for a signal; None when it never started."""
    spawn_error: str | None = None
    """The reason that the training did not start; None if it did."""
    lost_ranks: tuple[int, ...] = ()
    """Ranks that exited unasked without recording their end, the first seen first."""
    oom_kills: int = 0
    """The kernel's out-of-memory kills during the run."""
    stop_ns: int | None = None
    """Time of a requested stop (CLOCK_MONOTONIC); None without a request."""
    sigkill: bool = False
    """True if the stop took SIGKILL, after `grace_s`."""
    grace_s: float = 0.0
    """Seconds from SIGTERM to SIGKILL; 0 if SIGKILL was asked for at once."""
    torn_down_reason: str | None = None
    """The reason that the supervisor ended the remaining ranks; None if it did not."""
    full_disk_text: str | None = None
    """The disk that the run offloads to, with its free space, if that disk is full."""
    lost_nodes: dict[int, str] = {}
    """Nodes that were lost while this one trained, each with the reason in words."""
    killed_agent: str | None = None
    """The node whose agent of torchrun died of a signal that no supervisor sent, in words; None without one."""
    unended: list[UnendedProcess] = []
    unkillable_s: float = 0.0
    """Seconds that the processes of `unended` were given after SIGKILL."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `events.jsonl`.

    `kind` is supervisor, launched and exited (the training's direct child), ended (nothing of the training is left;
    the facts are in `end`), state, stop_requested, kill_sent, throttle_on, throttle_off, xid, foreign_process,
    gpu_lost, gpu_back, output_trimmed, steps_trimmed, telemetry_trimmed, rank_gone, node_lost, no_step (a script has
    reported none for long) or trouble (the supervisor could not write or read a file).
    """

    t_ns: Count
    kind: str
    state: str | None = None
    reason: str | None = None
    pid: int | None = None
    start_ticks: int | None = None
    deadline_ns: int | None = None
    rank: int | None = None
    device: int | None = None
    detail: str | None = None
    exit_code: int | None = None
    """Exit code of the direct child, in events of kind `exited`; negative for a signal."""
    memory_used_bytes: int | None = None
    """Device memory of a process on a GPU when it was seen."""
    end: TrainingEnd | None = None
    start: RunStart | None = None
    """In events of kind `launched`."""
    node: NodeStart | None = None
    """In events of kind `supervisor`, of a run on several nodes."""


@dataclass
class StepTotals:
    """Counts and highest peaks over the steps of one rank. The cap of the file removed the lines of `dropped` steps."""

    measured_read: int = 0
    """Measured steps whose lines were read."""
    warmup: int = 0
    not_finite: int = 0
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    alloc_retries: int | None = None
    phase_peaks: dict[str, int] = field(default_factory=dict)
    dropped: int = 0
    missing: int = 0
    """Steps between the first and the last that have no line."""
    _last_step: int | None = None

    @property
    def measured(self) -> int:
        """Measured steps, the dropped ones included: a cap is reached long after the warm-up."""
        return self.measured_read + self.dropped

    def add(self, step: Step) -> Step:
        """Add the rank's next step, and return it."""
        if step.warmup:
            self.warmup += 1
        else:
            self.measured_read += 1
        self.not_finite += step.loss_not_finite
        self.peak_allocated_bytes = highest((self.peak_allocated_bytes, step.peak_allocated_bytes))
        self.peak_reserved_bytes = highest((self.peak_reserved_bytes, step.peak_reserved_bytes))
        self.alloc_retries = highest((self.alloc_retries, step.alloc_retries))
        for phase, peak in (step.phase_peaks or {}).items():
            self.phase_peaks[phase] = max(self.phase_peaks.get(phase, 0), peak)
        if self._last_step is not None:
            self.missing += max(0, step.step - self._last_step - 1)
        self._last_step = step.step
        return step
