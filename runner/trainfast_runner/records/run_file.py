"""The typed shape of `run.json`. Unknown fields are ignored, absent ones are None.

It holds one wall-clock anchor, by which the times of all records become dates.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import msgspec

FIRST_TORCH = "2.5"
"""The first torch that loads the hooks: it calls the entry points of group `torch.backends`."""


class ScriptAsked(msgspec.Struct, frozen=True, kw_only=True):
    """`script` of `run.json`; the hooks in the script read it too."""

    command: list[str]
    """The command as typed."""
    argv: list[str]
    """The command as started."""
    steps: int | None = None
    """None for a script that ends by itself."""
    timing_warmup: int = 3
    samples_per_step: int | None = None
    steps_from_log: str | None = None
    """A regular expression that matches a line of output for each step; the hooks then count none."""
    flagged: list[str] = []
    """Knobs that flags of the script's own take."""
    flag_words: dict[str, Any] = msgspec.field(default_factory=dict, name="places")
    """Words of the command for knobs (JSON `places`), as in `[script.knobs]` of a preset:
    text with {} for the value, or words by value."""
    trainer_fields: dict[str, Any] = {}
    """Fields of TrainingArguments that the hooks set."""
    loader_defaults: dict[str, Any] = {}
    """Defaults of DataLoader's arguments that the hooks set."""
    hooks_blocked: str | None = msgspec.field(default=None, name="door_closed")
    """The reason that the hooks cannot load (JSON `door_closed`); None if they can."""
    unconfirmed: list[str] = []
    """Knobs set without a flag that the script may not take: an argument of its own wins over them."""
    trial: bool = False
    """True for a trial of a search: its memory is limited and it leaves nothing behind."""
    longest_first: bool = False
    """True for a trial of a batch search, whose untimed steps take the longest samples."""


class Overridden(msgspec.Struct, frozen=True, kw_only=True):
    """A knob that was asked for and that ran otherwise."""

    knob: str
    asked: Any
    ran: Any
    """The value that ran; None if the script does not show it."""
    by: str
    """The framework that overrode the knob, or the script."""


class BatchWidths(msgspec.Struct, frozen=True, kw_only=True):
    """Widths of the model's inputs in a trial of a batch search, in values a sample; None where none was seen."""

    narrowest: int | None = None
    widest: int | None = None
    longest_first: bool = False
    """True if the untimed steps took the longest samples that the data set told of."""
    looked_at: int = 0
    """Samples whose length was seen."""
    samples: int = 0
    """Samples that the sampler may give."""

    @property
    def differ(self) -> bool:
        """True if batches of several widths were seen."""
        return (self.narrowest or 0) < (self.widest or 0)

    @property
    def has_widest(self) -> bool:
        """True if no batch of the data set is wider than the widest that was seen."""
        return not self.differ or (self.longest_first and self.looked_at >= self.samples)


class ScriptFigures(msgspec.Struct, frozen=True, kw_only=True):
    """`script` of `result.json`."""

    command: list[str]
    cwd: str | None = None
    """The folder that the command started in."""
    exit_code: int | None = None
    """Exit code of the command, negative for a signal; None if it never started."""
    framework: str | None = None
    """The framework whose steps were counted."""
    hooks: list[str] = []
    """The hooks that ran."""
    samples_from: str | None = None
    """The source of a step's samples."""
    unknown: dict[str, str] = {}
    """The reason of each null field of the step records."""
    overridden: list[Overridden] = []
    suppressed: list[str] = []
    """Actions that a trial kept the script from; a plain run suppresses none."""
    evaluation_seconds: float | None = None
    """Time of evaluations, which is in no step; None if no hook reported."""

    def is_of_one_script(self, other: ScriptFigures) -> bool:
        """True if both commands start one script: one file, or one name where a folder is unknown."""
        ours, theirs = self._script(), other._script()
        if not self.cwd or not other.cwd:
            return os.path.basename(ours) == os.path.basename(theirs)
        return os.path.normpath(os.path.join(self.cwd, ours)) == os.path.normpath(os.path.join(other.cwd, theirs))

    def _script(self) -> str:
        """The file or module that the command trains with, else its program."""
        index = script_index(self.command)
        return script_name([*self.command, ""][index or 0])


class HookLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `door.jsonl`: `opened` in each process that imported torch, or `trouble` of the hooks."""

    t_ns: int
    kind: str
    pid: int | None = None
    rank: int | None = None
    torch: str | None = None
    detail: str | None = None


RecordedKnobs = dict[str, Any]
"""Values of knobs by name, as a file has them: undecoded, and of any version. `spec.spec_of_record` decodes them."""

SCHEMA = 1
"""Version of `run.json` and `result.json`."""


class ClockAnchor(msgspec.Struct, frozen=True, kw_only=True):
    """One instant on both clocks: `monotonic_ns` of this boot, `wall_ns` since the epoch."""

    monotonic_ns: int
    wall_ns: int


def name_of(preset: str, variant: str | None) -> str:
    """A preset as it is written on the command line."""
    return f"{preset}/{variant}" if variant else preset


class RecordedSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A `RunSpec` in files: written from `RunSpec.record_fields`, read by `spec.spec_of_record`."""

    preset: str
    variant: str | None = None
    title: str = ""
    model: dict[str, Any] = {}
    data: dict[str, Any] = {}
    knobs: RecordedKnobs = {}
    overrides: list[str] = msgspec.field(default_factory=list, name="changed")

    @property
    def name(self) -> str:
        """The preset as it is written on the command line."""
        return name_of(self.preset, self.variant)

    def override_values(self) -> dict[str, Any]:
        """Overrides of the preset by `--set` or the screen: `knob`, `model.FIELD` or `data.FIELD`, with the value."""
        sections = {"model": self.model, "data": self.data}
        values = {}
        for key in self.overrides:
            section, dot, name = key.partition(".")
            values[key] = sections.get(section, {}).get(name) if dot else self.knobs.get(key)
        return values


class PredictedSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Median samples/s of a run, and the 90 % interval in which it is expected to be measured."""

    median: float
    low: float
    high: float
    basis: str = msgspec.field(name="from", default="")
    """The source of the figures in a few words."""


class LaunchThreads(msgspec.Struct, frozen=True, kw_only=True):
    """The wait policy of a CPU run's OpenMP threads, its reason, and the load of others at launch, in cores.

    `wait` is passive, default, unused, or the user's settings.
    """

    wait: str | None = None
    reason: str | None = None
    others_cores: float | None = None


class ForeignProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that is not the run's, on the GPU with the NVML index `device`."""

    device: int | None = None
    pid: int | None = None
    memory_used_bytes: int | None = None


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """`predicted` of `run.json`: the peak of the fullest rank.

    Around the given batch size the peak is `fixed_bytes + batch_size * bytes_per_sample`.
    """

    total_bytes: int = 0
    """The allocator's peak: the sum of all below but `context_bytes`."""
    params_bytes: int = 0
    frozen_bytes: int = 0
    quantized_bytes: int = 0
    grads_bytes: int = 0
    optimizer_bytes: int = 0
    activations_bytes: int = 0
    temporary_bytes: int = 0
    communication_bytes: int = 0
    context_bytes: int | None = None
    """CUDA context and kernels, outside the allocator; None without a GPU."""
    phase: str = ""
    """The phase of the peak."""
    phases: dict[str, dict[str, int]] = {}
    """The categories of each phase, and their `total`, at its own peak."""
    fixed_bytes: int = 0
    bytes_per_sample: int = 0
    basis: str = ""
    """The source of the figures, in words."""
    attention: str = ""
    """The model's attention kernel, and the reason that `attention=auto` takes it."""
    trace: str = ""
    """The name of the underlying trace."""
    fullest: str = ""
    """The fullest rank in words; empty if all ranks are alike."""
    traced_bytes: dict[str, int] = {}
    """Each phase's peak before any correction by measured runs."""

    def category(self, name: str) -> int:
        """Bytes of one of CATEGORIES at the peak."""
        return int(getattr(self, f"{name}_bytes"))


class RunNode(msgspec.Struct, frozen=True, kw_only=True):
    """One node of a run on several: the place of its ranks. Nodes share the home, and have a supervisor each."""

    host: str = ""
    """The name by which ssh reaches the node; `local` for the machine of the launch, empty where Slurm picks it."""
    world_size: int = 1
    """The number of its ranks."""
    address: str = ""
    """The address that it publishes to the others; empty where only its supervisor can tell."""
    device_uuids: list[str] = []
    """Its GPUs among those of the run; empty on a CPU."""


class RunFile(RecordedSpec, frozen=True, kw_only=True):
    """`run.json`: the run as asked for, written once before any process starts."""

    schema: int = SCHEMA
    run_id: str
    device: str = "cpu"
    world_size: int = 1
    device_uuids: list[str] = []
    device_names: list[str] = []
    compute_capabilities: list[str] = []
    """Compute capabilities of the GPUs in `device_names`, as in `8.6`; empty on a CPU or if one is unknown."""
    watch_uuids: list[str] = []
    memory_limit_bytes: list[int] | None = None
    """The limit of each rank; None without one."""
    python: str = ""
    limits: dict[str, int] = {}
    """The limits that the run inherits and that bind: bytes of memory, and RLIMIT_NPROC."""
    argv: list[str] = []
    env: dict[str, str] = {}
    """Only the variables that the launch changed."""
    versions: dict[str, str | None] = {}
    cwd: str = ""
    git_commit: str | None = None
    host: str = ""
    """The name of the machine that the run is on."""
    nodes: list[RunNode] = []
    """The nodes of a run on several; empty for a run on one machine."""
    by_slurm: bool = False
    """True if Slurm places the nodes."""
    number: int | None = None
    """The number of its launch in this home."""
    boot_id: str = ""
    clock: ClockAnchor
    asked_ns: int | None = None
    """CLOCK_MONOTONIC at which the run was asked for, before it was planned; None in records without it."""
    cache_dir: str = ""
    used_before_bytes: dict[str, int] = {}
    start_temperature_c: float | None = None
    foreign_processes: list[ForeignProcess] = []
    clean: bool = True
    """True if memory was back to its level before the last run on the same devices, plus 64 MiB."""
    link: str | None = None
    """The slowest path between two of the run's GPUs, as `topo` signs it; None for fewer than two."""
    role: str | None = None
    """`probe` for the process in which a search tries batch sizes, `proof` for its last run, `trial` for a process in
    which it tries settings, `cold` for a run of one setting; None for any other."""
    search_id: str | None = None
    calibration: dict[str, Any] | None = None
    """The ceiling that was measured on this device; None when not measured."""
    predicted: Prediction | None = None
    """The memory that was predicted for the fullest rank; None when nothing was."""
    predicted_speed: PredictedSpeed | None = None
    """The speed that was predicted before the launch; None when none was."""
    script: ScriptAsked | None = None
    """The user's own script that the run is about; None for a preset's."""
    threads: LaunchThreads | None = None
    """None for a run on GPUs, and for a script with several ranks, whose launcher sets their threads."""
    cpu_has_fp16: bool | None = None
    """True if the CPU computes in fp16; None for a run on GPUs."""

    @property
    def has_named_nodes(self) -> bool:
        """True for a run on several nodes, which reads requests to stop from its directory, on whatever machine."""
        return self.by_slurm or any(node.host for node in self.nodes)

    @property
    def predicted_bytes(self) -> int | None:
        """The peak that was predicted for the fullest rank; None when nothing was."""
        return None if self.predicted is None else self.predicted.total_bytes

    @property
    def calibrated_tflops(self) -> dict[str, float]:
        """The TFLOP/s that were measured on this device, by precision; empty when not measured."""
        try:
            measured = msgspec.convert((self.calibration or {}).get("tflops", {}), dict[str, float])
        except msgspec.ValidationError:
            return {}
        return {name: value for name, value in measured.items() if value > 0}

    @property
    def devices_used(self) -> int:
        """The number of devices that the run computes on: one a rank, or several GPUs of one process."""
        return max(self.world_size, len(self.device_uuids))

    @property
    def gpu_uuids(self) -> list[str]:
        """The GPUs that the run is about: those its ranks use, else those that were joined to it with `watch`."""
        return self.device_uuids or self.watch_uuids


TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
ACCELERATE_MODULES = ("accelerate.commands.accelerate_cli", "accelerate.commands.launch")
SCRIPT_RUNNERS = (
    *TORCHRUN_MODULES,
    *ACCELERATE_MODULES,
    *("deepspeed.launcher.runner", "cProfile", "coverage", "debugpy", "ipdb", "kernprof", "line_profiler"),
    *("memory_profiler", "pdb", "profile", "pyinstrument", "scalene", "trace", "viztracer"),
)
"""Modules that run the script or module given after them."""
PYTHON = re.compile(r"python(\d(\.\d+)*)?")
"""File names of a Python."""
PYTHON_LETTERS = "[bBdEiIOPqsSuvx]*"
"""Python's own options of one letter without a value, which may stand before `m` in one word: `python -um MODULE`."""
MODULE_FLAG = re.compile(rf"-{PYTHON_LETTERS}m|--module")
"""The word before a module; `--module` is torchrun's."""
FLAG_WITH_MODULE = re.compile(rf"-{PYTHON_LETTERS}m([^\W\d][\w.]*)")
"""A word of Python's that names the module too: `python -mMODULE`."""
PYTHON_OPTION_BEFORE_VALUE = re.compile(rf"-{PYTHON_LETTERS}[XW]|--check-hash-based-pycs")
"""A word of Python's options that takes the next word."""
PROGRAM_OPTION = re.compile(rf"-{PYTHON_LETTERS}([mc])(.*)", re.DOTALL)
"""The last of Python's options, `-m` or `-c`, with the module or text where they are in the same word."""


def script_index(words: Sequence[str]) -> int | None:
    """Return the index of the word with the script's file or module (`script_name`); None if there is neither."""
    is_python = False
    for index, word in enumerate(words):
        # `numactl -m 0` and `docker run -m 4g` name memory.
        is_module = index > 0 and MODULE_FLAG.fullmatch(words[index - 1]) and re.match(r"[^-\d]", word)
        # Only a Python's: another program's option may look the same, as in `train -dimension 2`.
        is_module = is_module or (is_python and FLAG_WITH_MODULE.fullmatch(word))
        if word.endswith(".py") or (is_module and script_name(word) not in SCRIPT_RUNNERS):
            return index
        option = PROGRAM_OPTION.fullmatch(word) if is_python else None
        if (is_python and word == "-") or (option is not None and option[1] == "c"):
            # The words after it are arguments of a program without a name: a module flag of theirs is their own.
            return next((at for at in range(index + 1, len(words)) if words[at].endswith(".py")), None)
        is_python = is_python or PYTHON.fullmatch(os.path.basename(word)) is not None
    return None


def program_index(words: Sequence[str]) -> int:
    """Return the index of a Python's program in `words`, which begin with the Python: a file, `-`, `-m` or `-c`.

    The index is past the end of the words if there is no program.
    """
    index = 1
    while index < len(words) and words[index].startswith("-") and words[index] != "-":
        if PROGRAM_OPTION.fullmatch(words[index]):
            break
        index += 2 if PYTHON_OPTION_BEFORE_VALUE.fullmatch(words[index]) else 1
    return index


def script_name(word: str) -> str:
    """Return the script's file or module of the word at `script_index`: MODULE of `-mMODULE`."""
    with_module = FLAG_WITH_MODULE.fullmatch(word)
    return word if with_module is None else with_module[1]


DISCOVERED_FILE = "discovered.json"
FRAMEWORKS = ("HF Trainer", "accelerate", "Lightning", "torch")
"""The frameworks that train scripts. The first found counts: a Trainer uses accelerate."""


class Flag(msgspec.Struct, frozen=True, kw_only=True):
    """One flag of a script, or one value of its Hydra configuration."""

    names: list[str]
    type: str = "str"
    """int, float, bool, str, list, `switch` for a flag without a value, or `off switch` for one that turns its setting
    off."""
    default: Any = None
    value: Any = None
    """The value that the command gives, else the default."""
    choices: list[str] = []
    off: str | None = None
    """The flag that turns a switch off."""
    help: str = ""
    assigned: bool = False
    """True if the command line takes it as `NAME=VALUE`."""

    @property
    def name(self) -> str:
        """The longest name of the flag."""
        return max(self.names, key=len)


class Discovered(msgspec.Struct, frozen=True, kw_only=True):
    """Findings of a script's run to its parser."""

    stopped_at: str
    """The point at which the script ended."""
    parser: str | None = None
    """The kind of its parser; None without one."""
    flags: list[Flag] = []
    knobs: dict[str, Any] = {}
    """Knobs by the TrainingArguments that the script filled itself; empty without them."""
    uses: list[str] = []
    """The frameworks that its own names come from."""

    @property
    def framework(self) -> str | None:
        """The framework that trains, one of `FRAMEWORKS`; None if the script stopped before it showed one."""
        if self.knobs:
            return "HF Trainer"
        if self.stopped_at == "a Lightning Trainer":
            return "Lightning"
        shown = next((name for name in FRAMEWORKS if name in self.uses), None)
        if shown is not None:
            return shown
        if self.stopped_at in ("the first optimizer", "the first forward pass"):
            return "torch"
        # A Trainer has its arguments, and a script with them ends there, before any optimizer.
        return "HF Trainer" if self.parser == "HfArgumentParser" else None
