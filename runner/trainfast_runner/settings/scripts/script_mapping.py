"""The mapping of knobs to a script's own flags: proposed from the flags' names, types and defaults, each with a reason.

The names are those of the Hugging Face examples, accelerate, Lightning, DeepSpeed, timm, nanoGPT and fairseq.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainfast_runner.errors import UserError
from trainfast_runner.records.discovered import Flag
from trainfast_runner.settings.knob_values import KnobValue
from trainfast_runner.settings.knobs import knob
from trainfast_runner.settings.precisions import ACCELERATE_NAMES, LIGHTNING_NAMES, PRECISIONS
from trainfast_runner.settings.scripts.script_preset import FlagWords
from trainfast_runner.worker.catalog import OPTIMIZERS

NUMBER_FLAGS = {
    "batch_size": (
        *("per_device_train_batch_size", "per_gpu_train_batch_size", "train_micro_batch_size_per_gpu"),
        *("micro_batch_size", "device_batch_size", "per_device_batch_size", "train_batch_size", "batch_size"),
        *("batchsize", "train_bs", "bs", "batch", "mbs", "b"),
    ),
    "grad_accum": (
        *("gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum_steps", "grad_accumulation_steps"),
        *("accumulation_steps", "gradient_accumulation", "grad_accum", "accum_steps", "accum_iter", "update_freq"),
        *("accum", "acc_steps"),
    ),
    "workers": (
        *("dataloader_num_workers", "num_workers", "n_workers", "nworkers", "data_workers", "loader_workers"),
        *("workers", "nw", "j"),
    ),
    "seq_len": ("max_seq_length", "sequence_length", "seq_length", "seq_len", "block_size", "max_seq_len"),
    "prefetch": ("dataloader_prefetch_factor", "prefetch_factor"),
    "lr": ("learning_rate", "lr", "base_lr"),
    "weight_decay": ("weight_decay", "wd"),
    "grad_clip": ("max_grad_norm", "grad_clip", "gradient_clip_val", "clip_grad", "clip_grad_norm"),
    "seed": ("seed", "random_seed"),
}
"""Names of the flags that take a knob's number, without dashes, the surest first."""
SWITCH_FLAGS = {
    "checkpointing": (
        *("gradient_checkpointing", "grad_checkpointing", "activation_checkpointing", "checkpoint_activations"),
        "use_checkpoint",
    ),
    "compile": ("torch_compile", "torchcompile", "compile"),
    "pin_memory": ("dataloader_pin_memory", "pin_memory", "pin_mem"),
}
ON_VALUES = {"checkpointing": "full", "compile": "default", "pin_memory": "on"}
PRECISION_FLAGS = ("mixed_precision", "precision", "amp_dtype", "dtype", "torch_dtype")
_FLAG_PRECISIONS = ("fp32", "fp16", "bf16")
PRECISION_FAMILIES = (
    {name: ACCELERATE_NAMES[name] for name in _FLAG_PRECISIONS},
    {name: PRECISIONS[name].compute_dtype for name in _FLAG_PRECISIONS},
    {name: name for name in _FLAG_PRECISIONS},
    {name: LIGHTNING_NAMES[name] for name in _FLAG_PRECISIONS},
    {"fp32": "32", "fp16": "16", "bf16": "bf16"},
)
"""The values that a flag for the precision takes: accelerate's, torch's, ours, Lightning's new and old."""
HALF_FLAGS = {"bf16": ("bf16", "use_bf16", "bfloat16"), "fp16": ("fp16", "use_fp16")}
EITHER_HALF_FLAG = "half"
"""Name of a flag for fp16, or for bf16 where its help says so."""
BF16_WORD = re.compile(r"\bb(?:float|f)16\b", re.IGNORECASE)
FP16_WORD = re.compile(r"\bf(?:loat|p)16\b", re.IGNORECASE)
KEPT_KNOBS = ("batch_size", "grad_accum", "precision", "workers", "checkpointing")
"""The knobs whose present values a preset of a script keeps: those that a search begins with."""
OPTIMIZER_FLAGS = ("optim", "optimizer", "opt")
NOT_TRAINING_WORDS = {"eval", "val", "valid", "validation", "test", "dev", "predict", "inference"}
MAX_CHOICES_LISTED = 8
"""Choices that a reason lists; of a flag with more it gives the default."""


@dataclass(frozen=True)
class FlagMapping:
    """The flag that takes a knob, as words of the command, and the script's present value of the knob."""

    knob: str
    flag_words: FlagWords
    value: KnobValue
    """None if the present value is none of the knob's."""
    reason: str
    """The reason for this flag."""


def propose(flags: Sequence[Flag]) -> list[FlagMapping]:
    """The knobs that these flags seem to take, one flag each."""
    mappings = [_number_mapping(name, names, flags) for name, names in NUMBER_FLAGS.items()]
    mappings += [_switch_mapping(name, names, flags) for name, names in SWITCH_FLAGS.items()]
    mappings += [_precision_mapping(flags) or _half_mapping(flags), _optimizer_mapping(flags)]
    return [mapping for mapping in mappings if mapping is not None]


def _number_mapping(name: str, names: Sequence[str], flags: Sequence[Flag]) -> FlagMapping | None:
    kinds = ("int", "float") if name in ("lr", "weight_decay", "grad_clip") else ("int",)
    for flag, word in _flags_named(names, flags):
        if flag.type in kinds:
            return FlagMapping(
                name, flag_words_of(flag, word), value_or_none(name, flag.value), _reason(name, flag, word)
            )
    return None


def _switch_mapping(name: str, names: Sequence[str], flags: Sequence[Flag]) -> FlagMapping | None:
    for flag, word in _flags_named(names, flags):
        if flag.type in ("switch", "bool"):
            return FlagMapping(name, on_and_off(name, flag, word), present_value(name, flag), _reason(name, flag, word))
    return None


def on_and_off(name: str, flag: Flag, word: str) -> FlagWords:
    """Return the words of a knob that a flag turns on and off, where the flag is typed as `word`."""
    return {ON_VALUES[name]: _switch_words(flag, word, on=True), "off": _switch_words(flag, word, on=False)}


def present_value(name: str, flag: Flag) -> KnobValue:
    """Return the value that the command gives a knob which this flag turns on and off."""
    return ON_VALUES[name] if flag.value is True else "off"


def _precision_mapping(flags: Sequence[Flag]) -> FlagMapping | None:
    """A flag that takes the name of a precision."""
    for flag, word in _flags_named(PRECISION_FLAGS, flags):
        flag_values = flag.choices or [str(flag.default), str(flag.value)]
        families = [
            {precision: value for precision, value in family.items() if not flag.choices or value in flag_values}
            for family in PRECISION_FAMILIES
        ]
        values = max(families, key=lambda family: len({*family.values()} & {*flag_values}))
        if flag.type in ("str", "int") and {*values.values()} & {*flag_values}:
            words = {precision: flag_words_of(flag, word).replace("{}", value) for precision, value in values.items()}
            value_now = next((precision for precision, value in values.items() if value == str(flag.value)), None)
            return FlagMapping("precision", words, value_now, _reason("precision", flag, word))
    return None


def _half_mapping(flags: Sequence[Flag]) -> FlagMapping | None:
    """Flags that turn a precision on."""
    by_precision: dict[str, tuple[Flag, str]] = {}
    for precision, names in HALF_FLAGS.items():
        for flag, word in _flags_named((*names, EITHER_HALF_FLAG), flags):
            is_meant = _bare_name(word) != EITHER_HALF_FLAG or _half_meant(flag) == precision
            if flag.type in ("switch", "bool") and is_meant:
                # The surest flag comes first.
                by_precision.setdefault(precision, (flag, word))
    if not by_precision:
        return None
    off_words = " ".join(words for settings in by_precision.values() if (words := _switch_words(*settings, on=False)))
    flag_words: FlagWords = {
        **{precision: _switch_words(*settings, on=True) for precision, settings in by_precision.items()},
        "fp32": off_words,
    }
    value_now = next((precision for precision, (flag, _) in by_precision.items() if flag.value is True), "fp32")
    flag, word = by_precision[next(iter(by_precision))]
    return FlagMapping("precision", flag_words, value_now, _reason("precision", flag, word))


def _half_meant(flag: Flag) -> str:
    return "bf16" if BF16_WORD.search(flag.help) and not FP16_WORD.search(flag.help) else "fp16"


def _optimizer_mapping(flags: Sequence[Flag]) -> FlagMapping | None:
    """The Trainer's `--optim`, whose values are known."""
    values = {name: entry.trainer_name for name, entry in OPTIMIZERS.items() if entry.trainer_name}
    for flag, word in _flags_named(OPTIMIZER_FLAGS, flags):
        by_name = {name: value for name, value in values.items() if not flag.choices or value in flag.choices}
        if {*by_name.values()} & {str(flag.default), *flag.choices}:
            words = {name: flag_words_of(flag, word).replace("{}", value) for name, value in by_name.items()}
            value_now = next((name for name, value in by_name.items() if value == str(flag.value)), None)
            return FlagMapping("optimizer", words, value_now, _reason("optimizer", flag, word))
    return None


def _flags_named(names: Sequence[str], flags: Sequence[Flag]) -> Iterator[tuple[Flag, str]]:
    """The flags of these names, each with the name as it is typed; the surest first."""
    for name in names:
        named_flags = [
            (flag, word) for flag in flags for word in flag.names if _bare_name(word) == name and _is_for_training(word)
        ]
        # A configuration may have the name twice, for training and for something else.
        yield from sorted(
            named_flags,
            key=lambda named_flag: (
                "train" not in named_flag[1],
                not named_flag[1].startswith("--"),
                len(named_flag[1]),
            ),
        )


def _bare_name(word: str) -> str:
    """A flag's name without dashes and, of a configuration, without the groups around it."""
    return word.lstrip("-").rpartition(".")[2].replace("-", "_").lower()


def _is_for_training(word: str) -> bool:
    return not NOT_TRAINING_WORDS & set(word.lstrip("-").lower().replace("-", "_").replace(".", "_").split("_"))


def flag_words_of(flag: Flag, word: str) -> str:
    """Return the words for a flag with a value, where the flag is typed as `word`."""
    return f"{word}={{}}" if flag.assigned else f"{word} {{}}"


def _switch_words(flag: Flag, word: str, *, on: bool) -> str:
    """The words that turn a flag on or off; empty where its absence does."""
    if flag.type == "bool":
        return flag_words_of(flag, word).replace("{}", str(on).lower())
    return word if on else flag.off or ""


def value_or_none(name: str, value: object) -> KnobValue:
    """Return a value that the knob takes; None for any other."""
    try:
        return knob(name).read(value)
    except UserError:
        return None


def _reason(name: str, flag: Flag, word: str) -> str:
    """Return a sentence: "--bs is a usual name for batch_size; default 16, this command gives 8"."""
    if 0 < len(flag.choices) <= MAX_CHOICES_LISTED:
        flag_facts = f"one of {', '.join(flag.choices)}"
    else:
        flag_facts = "no default" if flag.default is None else f"default {flag.default}"
    present_text = f", this command gives {flag.value}" if flag.value != flag.default else ""
    return f"{word} is a usual name for {name}; {flag_facts}{present_text}"
