"""`[script]` of a preset file: the command of a user's own script, and the flags that take its knobs.

schema = 1
title = "my training"
[script]
command = ["python", "train.py"]        # `run NAME` starts it
cwd = "/home/me/project"                # the folder that it starts in
framework = "accelerate"                # what trains, if discovery found it: some knobs need no flag then
[script.knobs]
batch_size = "--per_device_train_batch_size {}"
precision = { bf16 = "--bf16", fp32 = "" }
[knobs]
batch_size = 16
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from trainfast_runner.errors import UserError, nearest
from trainfast_runner.records.run_file import FRAMEWORKS, Flag, script_index
from trainfast_runner.settings import presets
from trainfast_runner.settings.knob_values import KnobValue, KnobValues
from trainfast_runner.settings.knobs import knob
from trainfast_runner.settings.precisions import ACCELERATE_NAMES, LIGHTNING_NAMES, PRECISIONS
from trainfast_runner.settings.presets import read_toml
from trainfast_runner.worker.catalog import OPTIMIZERS

TOP_KEYS = ("schema", "title", "script", "knobs")
SCRIPT_KEYS = ("command", "cwd", "framework", "knobs")
FLAG = re.compile(r"-{1,2}[A-Za-z]")
"""The beginning of a flag; `-1` is a number."""

NOTHING = "nothing"
"""The word for no words where flag words are shown or typed."""

FlagWords = str | dict[str, str]
"""Words of the command with {} for the value, or the words by value."""


class ScriptPreset(msgspec.Struct, frozen=True):
    """A script's command, the words in it that set each knob, and the knobs to set."""

    command: tuple[str, ...] = ()
    flag_words: dict[str, FlagWords] = msgspec.field(default_factory=dict)
    knobs: KnobValues = msgspec.field(default_factory=dict)
    name: str = ""
    """The preset's name; empty for a command as typed."""
    title: str = ""
    cwd: str = ""
    """The folder in which the command starts; empty for the present one."""
    framework: str = ""
    """One of `FRAMEWORKS`; empty if it is unknown."""
    file: str = ""
    """The preset's file; empty for a command as typed."""

    def applied(self, command: list[str], knobs: KnobValues) -> list[str]:
        """Return `command` with the flags of these knobs; a flag that stands there gets the value. Raises UserError."""
        for name, value in knobs.items():
            if name not in self.flag_words:
                continue
            flag_words = self.flag_words[name]
            flags = _flag_groups(words_of(name, flag_words, value))
            own_names = {_flag_name(flag) for flag in flags}
            texts = flag_words.values() if isinstance(flag_words, dict) else ()
            # The flags of another value would contradict these.
            groups = [group for text in texts for group in _flag_groups(split_words(text, name))]
            for other in groups:
                if _flag_name(other) not in own_names:
                    command = _without_flag(command, other)
            for flag in flags:
                command = _with_flag(command, flag)
        return command


def path_of(reference: str) -> Path | None:
    """The file of a preset that has `[script]`, by its name or path; None for any other, also an unreadable one."""
    if reference.endswith(".toml"):
        path: Path | None = Path(os.path.expanduser(reference))
    else:
        path = presets.preset_files().get(reference)
    if path is None:
        return None
    try:
        return path if "script" in read_toml(path)[1] else None
    except UserError:
        return None


def load(path: str | Path) -> ScriptPreset:
    """Read a preset file that has `[script]`. Raises UserError naming file, line and key."""
    file = Path(os.path.expanduser(path))
    source, raw = presets.read_preset_file(file, TOP_KEYS)
    script = source.table(raw, "script")
    source.refuse_unknown_keys(script, SCRIPT_KEYS, ("script",))
    by_knob = source.table(script, "knobs", ("script",))
    for name, flag_words in by_knob.items():
        with source.locating("script", "knobs", name):
            _check_flag_words(name, flag_words)
    cwd, framework = (source.text(script, key, ("script",)) for key in ("cwd", "framework"))
    if framework and framework not in FRAMEWORKS:
        raise source.error_at(("script", "framework"), f"there is no framework {framework!r}", allowed=FRAMEWORKS)
    command = script.get("command", [])
    if not isinstance(command, list) or not all(isinstance(word, str) and "\0" not in word for word in command):
        raise source.error_at(("script", "command"), "command must be a list of words")
    return ScriptPreset(
        tuple(command),
        by_knob,
        source.knobs(source.table(raw, "knobs"), ("knobs",)),
        name=file.stem,
        title=source.text(raw, "title"),
        cwd=os.path.realpath(file.parent / os.path.expanduser(cwd)) if cwd else "",
        framework=framework,
        file=str(file),
    )


def flag_words_text(flag_words: FlagWords) -> str:
    """The words in one line: `--bs {}`, or `bf16: --bf16, fp32: nothing`."""
    if isinstance(flag_words, str):
        return flag_words
    return ", ".join(f"{value}: {words or NOTHING}" for value, words in flag_words.items())


def flag_tokens(flag_words: FlagWords) -> set[str]:
    """Every word up to its `=`: the flags, and their values."""
    texts = [flag_words] if isinstance(flag_words, str) else flag_words.values()
    return {word.partition("=")[0] for text in texts for word in text.split()}


def split_words(text: str, key: str) -> list[str]:
    """The words of a text as a shell splits them. Raises UserError with this key for an open quote."""
    try:
        return shlex.split(text)
    except ValueError:
        raise UserError(f"a quote is open in {text!r}", key=key) from None


def words_of(name: str, flag_words: FlagWords, value: KnobValue) -> list[str]:
    """The words that give a knob this value. Raises UserError for one that the table of words lacks."""
    shown = knob(name).text_of(value)
    if isinstance(flag_words, str):
        return [word.replace("{}", shown) for word in split_words(flag_words, name)]
    if shown not in flag_words:
        raise UserError(f"{name}={shown} has no flag in the preset", key=name, allowed=flag_words)
    return split_words(flag_words[shown], name)


def _flag_groups(words: list[str]) -> list[list[str]]:
    """The words cut before each flag and each further NAME=VALUE."""
    groups: list[list[str]] = []
    for word in words:
        if not groups or FLAG.match(word) or ("=" in groups[-1][0] and "=" in word):
            groups.append([])
        groups[-1].append(word)
    return groups


def _with_flag(command: list[str], flag: list[str]) -> list[str]:
    """`command` with the flag: in place of the same one, else at the end."""
    name, equals, _ = flag[0].partition("=")
    place = _place_of(command, name, 1 if equals else len(flag) - 1)
    if place is None:
        return [*command, *flag]
    begin, end = place
    if command[begin] != name and not equals and len(flag) == 2:
        flag = [f"{name}={flag[1]}"]
    return [*command[:begin], *flag, *command[end:]]


def _without_flag(command: list[str], flag: list[str]) -> list[str]:
    """`command` without the flag, however often it stands there, and as many values as it takes."""
    while (place := _place_of(command, _flag_name(flag), len(flag) - 1)) is not None:
        command = [*command[: place[0]], *command[place[1] :]]
    return command


def _flag_name(flag: list[str]) -> str:
    return flag[0].partition("=")[0]


def _place_of(command: list[str], name: str, values: int) -> tuple[int, int] | None:
    """The begin and end of the last such flag after the script, which argparse takes, with at most so many values.

    A launcher before the script may have a flag of that name too.
    """
    for begin in range(len(command) - 1, (script_index(command) or 0) - 1, -1):
        if command[begin] == name or command[begin].startswith(f"{name}="):
            own = 0 if "=" in command[begin] else values
            following = itertools.takewhile(lambda word: not FLAG.match(word), command[begin + 1 : begin + 1 + own])
            return begin, begin + 1 + len(list(following))
    return None


def _check_flag_words(name: str, flag_words: object) -> None:
    """Raise UserError unless these are words with {} or words by value, for a knob and values that there are."""
    entry = knob(name)
    by_value: dict[str, Any] = flag_words if isinstance(flag_words, dict) else {}
    texts: list[Any] = list(by_value.values()) if isinstance(flag_words, dict) else [flag_words]
    if not all(isinstance(text, str) for text in texts) or (isinstance(flag_words, str) and "{}" not in flag_words):
        raise UserError(f"{name} needs words with {{}} for its value, or a table of words by value")
    for words in texts:
        split_words(words, name)
    for value in by_value:
        entry.read(value)


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
REAL_KNOBS = ("lr", "weight_decay", "grad_clip")
SWITCH_TYPES = ("switch", "bool")
"""The types of a flag that turns something on."""
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
TRAINER_OPTIMIZERS = {name: entry.trainer_name for name, entry in OPTIMIZERS.items() if entry.trainer_name}
"""The values of the Trainer's `--optim`."""
NOT_TRAINING_WORDS = {"eval", "val", "valid", "validation", "test", "dev", "predict", "inference"}
MAX_CHOICES_LISTED = 8
"""Choices that a reason lists; of a flag with more it gives the default."""


class FlagMapping(NamedTuple):
    """The flag that takes a knob, as words of the command, and the script's present value of the knob."""

    knob: str
    flag_words: FlagWords
    value: KnobValue
    """None if the present value is none of the knob's, or the words by value were typed."""
    reason: str
    """The reason for this flag."""


def propose(flags: Sequence[Flag]) -> list[FlagMapping]:
    """The knobs that these flags seem to take, one flag each."""
    mappings = [_surest_mapping(name, names, flags) for name, names in (NUMBER_FLAGS | SWITCH_FLAGS).items()]
    mappings.append(_word_mapping("precision", PRECISION_FLAGS, PRECISION_FAMILIES, flags) or _half_mapping(flags))
    mappings.append(_word_mapping("optimizer", OPTIMIZER_FLAGS, [TRAINER_OPTIMIZERS], flags))
    return [mapping for mapping in mappings if mapping is not None]


def _surest_mapping(name: str, names: Sequence[str], flags: Sequence[Flag]) -> FlagMapping | None:
    """The surest of the flags of these names, if its type is one for the knob."""
    types = SWITCH_TYPES if name in ON_VALUES else ("int", "float") if name in REAL_KNOBS else ("int",)
    named = ((flag, word) for flag, word in _flags_named(names, flags) if flag.type in types)
    return next((_mapping_of(name, flag, word, _reason(name, flag, word)) for flag, word in named), None)


def _turns_on(name: str, flag: Flag) -> bool:
    """True if the flag turns the knob on."""
    return name in ON_VALUES and flag.type in SWITCH_TYPES


def _mapping_of(name: str, flag: Flag, word: str, reason: str) -> FlagMapping:
    """The mapping of a knob to a flag, typed as `word`, that takes its value or turns it on and off."""
    if _turns_on(name, flag):
        on = ON_VALUES[name]
        words = {on: _switch_words(flag, word, on=True), "off": _switch_words(flag, word, on=False)}
        return FlagMapping(name, words, on if flag.value is True else "off", reason)
    return FlagMapping(name, _flag_words(flag, word), value_or_none(name, flag.value), reason)


def _word_mapping(
    name: str, names: Sequence[str], families: Sequence[Mapping[str, str]], flags: Sequence[Flag]
) -> FlagMapping | None:
    """A flag that takes the knob's value by a name of another tool: of the family that most of its values are in."""
    for flag, word in _flags_named(names, flags):
        flag_values = flag.choices or [str(flag.default), str(flag.value)]
        taken = [
            {value: text for value, text in family.items() if not flag.choices or text in flag_values}
            for family in families
        ]
        values = max(taken, key=lambda family: len({*family.values()} & {*flag_values}))
        if {*values.values()} & {*flag_values}:
            words = {value: _flag_words(flag, word).replace("{}", text) for value, text in values.items()}
            value_now = next((value for value, text in values.items() if text == str(flag.value)), None)
            return FlagMapping(name, words, value_now, _reason(name, flag, word))
    return None


def _half_mapping(flags: Sequence[Flag]) -> FlagMapping | None:
    """Flags that turn a precision on."""
    by_precision: dict[str, tuple[Flag, str]] = {}
    for precision, names in HALF_FLAGS.items():
        for flag, word in _flags_named((*names, EITHER_HALF_FLAG), flags):
            says_bf16 = BF16_WORD.search(flag.help) and not FP16_WORD.search(flag.help)
            is_meant = _bare_name(word) != EITHER_HALF_FLAG or precision == ("bf16" if says_bf16 else "fp16")
            if flag.type in SWITCH_TYPES and is_meant:
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


def _flags_named(names: Sequence[str], flags: Sequence[Flag]) -> Iterator[tuple[Flag, str]]:
    """The flags of these names, each with the name as it is typed; the surest first."""
    for name in names:
        named_flags = [(flag, word) for flag in flags for word in flag.names if _bare_name(word) == name]
        training_flags = [
            named for named in named_flags if NOT_TRAINING_WORDS.isdisjoint(re.split(r"[-_.]", named[1].lower()))
        ]
        # A configuration may have the name twice, for training and for something else.
        yield from sorted(
            training_flags, key=lambda named: ("train" not in named[1], not named[1].startswith("--"), len(named[1]))
        )


def _bare_name(word: str) -> str:
    """A flag's name without dashes and, of a configuration, without the groups around it."""
    return word.lstrip("-").rpartition(".")[2].replace("-", "_").lower()


def _flag_words(flag: Flag, word: str) -> str:
    """Return the words for a flag with a value, where the flag is typed as `word`."""
    return f"{word}={{}}" if flag.assigned else f"{word} {{}}"


def _switch_words(flag: Flag, word: str, *, on: bool) -> str:
    """The words that turn a flag on or off; empty where its absence does."""
    if flag.type == "bool":
        return _flag_words(flag, word).replace("{}", str(on).lower())
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


WORDS_BY_VALUE = re.compile(r"[\w.-]+: ")
"""The beginning of words by value, as `flag_words_text` shows them."""


def flag_mappings(flags: Sequence[Flag], changes: Iterable[str]) -> list[FlagMapping]:
    """The proposed mappings with every `KNOB=FLAG` that a person gave; `KNOB=` takes a knob out. Raises UserError."""
    by_knob = {mapping.knob: mapping for mapping in propose(flags)}
    for change in changes:
        name, equals, words = change.partition("=")
        if not equals:
            raise UserError(f"--map takes KNOB=FLAG, not {change!r}", key="--map")
        name = knob(name.strip()).name
        if words.strip():
            by_knob[name] = mapping_typed(name, words, flags, "given by --map", example=f"--map '{name}={{}}'")
        else:
            by_knob.pop(name, None)
    return list(by_knob.values())


def mapping_typed(name: str, typed: str, flags: Sequence[Flag], reason: str, example: str = "'{}'") -> FlagMapping:
    """The flag of a knob that a person typed: a flag, more words with {} for the value, or words by value as
    `flag_words_text` shows them.

    Raises UserError naming the nearest flag that the script has; `example` stands around words that would do.
    """
    typed = typed.strip()
    if WORDS_BY_VALUE.match(typed):
        return FlagMapping(name, _words_by_value(name, typed, flags), None, reason)
    parts = split_words(typed, name)
    word = parts[0].partition("=")[0] if parts else ""
    flag = _flag_of(word, flags)
    is_whole = parts == [word]
    if is_whole and "switch" in flag.type and not _turns_on(name, flag):
        raise UserError(f"{word} takes no value, which {name} needs", key=word)
    if is_whole:
        return _mapping_of(name, flag, word, reason)
    if "{}" not in typed:
        advice = example.replace("{}", f"{word} {{}}")
        raise UserError(f"{typed} has no {{}} for the value", key=name, advice=advice)
    return FlagMapping(name, typed, value_or_none(name, flag.value), reason)


def _flag_of(word: str, flags: Sequence[Flag]) -> Flag:
    """The flag of this name. Raises UserError naming the nearest that the script has."""
    names = {name: flag for flag in flags for name in flag.names}
    if word in names:
        return names[word]
    similar = nearest(word, names)
    message = f"the script has no flag {word}" if names else "the script has no flags"
    raise UserError(message, key=word, nearest=similar, allowed=None if similar or not names else sorted(names))


def _words_by_value(name: str, typed: str, flags: Sequence[Flag]) -> dict[str, str]:
    """The words by value of `bf16: --half, fp32: nothing`. Raises UserError for a value or a flag that there is not."""
    words_by_value: dict[str, str] = {}
    for part in typed.split(", "):
        value, colon, words = part.partition(":")
        if not colon:
            advice = f"'{part.strip()}: {NOTHING}'"
            raise UserError(f"{part!r} in {typed!r} is not VALUE: FLAG", key=name, advice=advice)
        words = "" if words.strip() == NOTHING else words.strip()
        for first in split_words(words, name)[:1]:
            _flag_of(first.partition("=")[0], flags)
        words_by_value[knob(name).text_of(knob(name).read(value.strip()))] = words
    return words_by_value
