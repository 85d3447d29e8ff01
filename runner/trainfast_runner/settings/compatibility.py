"""Refuse settings that cannot work together before launch: the error names both, and the nearest that can.

Each group of rules yields its refusals in order, the first of which counts: `if WHEN: yield refusal(KEY, SENTENCE,
NEAREST)`.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainfast_runner.errors import UserError
from trainfast_runner.machine.cpu import cpu_has_fp16
from trainfast_runner.machine.devices import VISIBLE_DEVICES, Machine
from trainfast_runner.machine.training_python import has_libaio, missing_tool, search_path
from trainfast_runner.records.json_lines import owner_of
from trainfast_runner.records.tick import is_instance
from trainfast_runner.settings import device_counts
from trainfast_runner.settings.knob_values import (
    MAX_CPU_PROCESSES,
    Choice,
    KnobValue,
    KnobValues,
    parse_bytes_per_rank,
    whole_number,
)
from trainfast_runner.settings.knobs import KNOBS_BY_NAME, defaults
from trainfast_runner.settings.precisions import PRECISIONS, PrecisionEntry, has_capability
from trainfast_runner.settings.spec import RunSpec, offload_folder
from trainfast_runner.units import CPU, asks_for_cpu, count_asked, cpu_processes, mebibytes
from trainfast_runner.worker import catalog
from trainfast_runner.worker.shared.host import DISK_FULL_BELOW_BYTES, free_bytes
from trainfast_runner.worker.shared.words import SMALLEST_VOCAB, longest_seq_len, positions_needed


@dataclass(frozen=True)
class Facts:
    """The settings asked for, the machine, the model's configuration and the installed packages.

    `machine` is the one that the run uses (`Machine.used_by`).
    """

    spec: RunSpec
    machine: Machine
    config: Mapping[str, Any]
    versions: Mapping[str, str | None]
    python: str
    attentions: tuple[str, ...] | None = None
    """Values of `attention` that the model has; None when unknown."""
    families: Mapping[str, tuple[str, ...]] | None = None
    """Model types that a package has code for, by package; None when unknown."""

    @property
    def knobs(self) -> KnobValues:
        """The knobs asked for."""
        return self.spec.knobs

    @property
    def strategy(self) -> catalog.StrategyEntry:
        """The catalog's entry of the strategy."""
        return catalog.STRATEGIES[str(self.knobs["strategy"])]

    @property
    def optimizer(self) -> catalog.OptimizerEntry:
        """The catalog's entry of the optimizer."""
        return catalog.OPTIMIZERS[str(self.knobs["optimizer"])]

    @property
    def engine(self) -> catalog.EngineEntry:
        """The catalog's entry of the engine."""
        return catalog.ENGINES[str(self.knobs["engine"])]

    @property
    def levers(self) -> list[tuple[catalog.LeverEntry, catalog.LeverValue]]:
        """The levers whose value is not the plain one, each with that value."""
        values = [(entry, entry[self.knobs[name]]) for name, entry in catalog.LEVERS.items()]
        return [(entry, value) for entry, value in values if value.name != entry.plain]

    @property
    def on_cpu(self) -> bool:
        """True if the run trains on the CPU."""
        return self.machine.device == "cpu"

    @property
    def rank_count(self) -> int:
        """Number of processes the run starts."""
        return device_counts.world_size(self.spec, self.machine)

    @property
    def device_count(self) -> int:
        """Number of devices the run uses."""
        return device_counts.device_count(self.spec, self.machine)


Refusals = Iterator[UserError]
Rules = Callable[[Facts], Refusals]
"""A group of rules. It may raise the UserError of devices that do not exist."""


def refusal(key: str, sentence: str, nearest: str | None = None, allowed: Iterable[str] | None = None) -> UserError:
    """The error about the knob or field `key`; `nearest` are settings that work."""
    return UserError(sentence, key=key, advice=nearest, allowed=allowed)


def _devices(facts: Facts) -> Refusals:
    """Devices that do not exist, to train on or to watch; and several for a strategy of one."""
    asked, machine, strategy = device_counts.devices_asked(facts.knobs), facts.machine, facts.strategy
    if machine.refusal is not None:
        yield machine.refusal
    gpus = device_counts.chosen_gpus(facts.knobs, machine)
    machine.watched(facts.knobs["watch"], gpus)
    allowed = [f"1 to {MAX_CPU_PROCESSES}"]
    if facts.on_cpu and isinstance(asked, str) and not asks_for_cpu(asked):
        sentence = f"devices={asked} names GPUs and a run here has none ({machine.no_gpu_reason});"
        yield refusal("devices", f"{sentence} without a GPU devices is a count of processes", allowed=allowed)
    count = len(gpus)
    if facts.on_cpu:
        processes = count_asked(asked)
        count = facts.rank_count if processes is None else processes
        if count > MAX_CPU_PROCESSES:
            sentence = f"devices={count}: at most {MAX_CPU_PROCESSES} processes on a CPU"
            yield refusal("devices", sentence, f"devices={MAX_CPU_PROCESSES}", allowed)
    if strategy.one_device and count > 1:
        several = catalog.nearest_strategy(strategy, lambda other: not other.one_device)
        sentence = f"strategy={strategy.name} trains on one device and devices={asked} asks for {count}"
        yield refusal("strategy", sentence, f"strategy={several} with devices={asked}, or devices=1")


def _levers_instead(facts: Facts) -> list[tuple[str, catalog.LeverValue, str]]:
    """The lever, its value, and the setting to take instead, of each that is not plain."""
    return [(entry.name, value, entry.instead(value)) for entry, value in facts.levers]


def _hardware(facts: Facts) -> Refusals:
    """A precision or a strategy that the devices asked for do not have."""
    strategy, asked = facts.strategy, facts.knobs["devices"]
    precision = PRECISIONS[str(facts.knobs["precision"])]
    gpus = device_counts.chosen_gpus(facts.knobs, facts.machine)
    if facts.on_cpu and precision.needs_gpus_reason:
        sentence = f"precision={precision.name} {precision.needs_gpus_reason} and this run is on the CPU"
        yield refusal("precision", sentence, "precision=fp32 or precision=bf16")
    other = "bf16" if precision.min_compute_capability > (8, 0) else "fp16"
    asked_values: list[tuple[str, PrecisionEntry | catalog.LeverValue, str]]
    asked_values = [("precision", precision, f"precision={other}"), *_levers_instead(facts)]
    for gpu in gpus:
        for knob, value, instead in asked_values:
            if not has_capability(gpu.compute_capability, value.min_compute_capability):
                least = ".".join(map(str, value.min_compute_capability))
                needs = f"{knob}={value.name} needs compute capability {least} or later"
                has = f"GPU {gpu.index}, {gpu.name or 'name unknown'}, has {gpu.compute_capability}"
                yield refusal(knob, f"{needs} and {has}", instead)
        if strategy.zero_stage in (1, 2) and is_instance(gpu.uuid):
            # DeepSpeed asks for the GPU's free memory by its index (stage_1_and_2.py; stage 3 does not ask).
            instance = f"devices={asked or 1} is the MIG instance {gpu.uuid} of {VISIBLE_DEVICES}"
            sentence = f"strategy={strategy.name} needs a GPU with an index, and {instance}"
            yield refusal("strategy", sentence, f"strategy={'zero3-offload' if strategy.offloads else 'zero3'}")
    if strategy.needs_gpus_reason is None:
        return
    needs = f"strategy={strategy.name} {strategy.needs_gpus_reason}"
    if asks_for_cpu(asked):
        devices = asked if (cpu_processes(asked) or 0) > 1 else f"{CPU}:2"
        instead = f"strategy={strategy.fallback} with devices={devices}"
        yield refusal("strategy", f"{needs}, and devices={asked} asks for the CPU", instead)
    elif facts.on_cpu:
        sentence = f"{needs}, and a run here has none ({facts.machine.no_gpu_reason})"
        yield refusal("strategy", sentence, f"strategy={strategy.fallback}")
    elif facts.device_count < 2:
        instead = "devices=2 where there are two, or strategy=single"
        yield refusal("devices", f"{needs}, and devices={asked or 'auto'} is one", instead)


def _entries_on_a_cpu(facts: Facts) -> Refusals:
    """An optimizer, and levers, that need a GPU."""
    optimizer = facts.optimizer
    asked_values: list[tuple[str, catalog.OptimizerEntry | catalog.LeverValue, str]]
    asked_values = [("optimizer", optimizer, f"optimizer={optimizer.fallback}"), *_levers_instead(facts)]
    for knob, value, instead in asked_values if facts.on_cpu else ():
        if value.needs_gpus_reason:
            sentence = f"{knob}={value.name} {value.needs_gpus_reason}, and this run is on the CPU"
            yield refusal(knob, sentence, instead)


def _link_on_a_cpu(facts: Facts) -> Refusals:
    """A link between GPUs."""
    if facts.on_cpu and facts.knobs["p2p"] == "off":
        sentence = "p2p=off closes the direct link between GPUs: it needs two GPUs, and this run is on the CPU"
        yield refusal("p2p", sentence, "p2p=on")


def _ranks(facts: Facts) -> Refusals:
    """Overrides without effect, limits for another number of ranks, devices that do not hold whole copies."""
    strategy, limit = facts.strategy, facts.knobs["memory_limit"]
    for name in facts.spec.overrides:
        knob = KNOBS_BY_NAME.get(name)
        if knob is not None and not knob.applies(facts.knobs):
            belongs = f"it belongs to {knob.obeyed_by} {' or '.join(knob.only_with)}"
            does_nothing = f"{name} does nothing with {knob.obeyed_by}={facts.knobs[knob.obeyed_by]}"
            yield refusal(name, f"{does_nothing}; {belongs}", f"leaving {name} out")
    if isinstance(limit, str):
        figures, ranks = len(parse_bytes_per_rank(limit)), facts.rank_count
        if figures not in (1, ranks):
            sentence = f"memory_limit={limit} names {figures} ranks and the run has {ranks}"
            several = [f"{ranks} values joined by +"] if ranks > 1 else []
            yield refusal("memory_limit", sentence, allowed=["one value", *several])
    if not strategy.model_axes:
        return
    degree, count = device_counts.model_degree(facts.knobs), facts.device_count
    degrees = [f"{axis}_degree={whole_number(facts.knobs, f'{axis}_degree')}" for axis in strategy.model_axes]
    requirement = f"strategy={strategy.name} with {' and '.join(degrees)}"
    if "dp" not in strategy.axes and count != degree:
        instead = f"devices={degree}" + (f", or {strategy.name}_degree={count}" if count > 1 else "")
        yield refusal("devices", f"{requirement} runs on {degree} devices, not on devices={count}", instead)
    if "dp" in strategy.axes and (count % degree or count == degree):
        least = f"needs a multiple of {degree} devices, at least {2 * degree}"
        # One axis less asks for fewer devices.
        axis = strategy.model_axes[-1]
        fewer = whole_number(facts.knobs, f"{axis}_degree")
        if len(strategy.model_axes) > 1:
            axis, fewer = strategy.fallback, 2 * fewer
        instead = f"devices={2 * degree}, or strategy={axis} with devices={fewer}"
        yield refusal("devices", f"{requirement} {least}; devices={count} is not", instead)


def _programs(facts: Facts) -> Refusals:
    """An optimizer, an engine or a compiler that does not work with the strategy."""
    strategy, optimizer, engine, mode = facts.strategy, facts.optimizer, facts.engine, facts.knobs["compile"]
    if (reason := optimizer.refusal(strategy)) is not None:
        takes = catalog.nearest_strategy(strategy, lambda other: optimizer.refusal(other) is None)
        other_optimizer = f"optimizer={catalog.nearest_optimizer(optimizer, strategy)}"
        instead = f"{other_optimizer}, or strategy={takes} with optimizer={optimizer.name}"
        allowed = [name for name, entry in catalog.OPTIMIZERS.items() if entry.refusal(strategy) is None]
        yield refusal("optimizer", f"optimizer={optimizer.name} {reason}", instead, allowed)
    if optimizer.early_reason is not None:
        early = f"it {optimizer.early_reason}, before"
        reloads = "Accelerate reloads its state, and vectors keep one rate"
        for knob, is_fine, reason, other in (
            ("grad_clip", not facts.knobs["grad_clip"], f"{early} they are clipped", 0),
            ("precision", facts.knobs["precision"] != "fp16", f"{early} they are unscaled", "bf16"),
            ("engine", engine.name == "native", reloads, "native"),
        ):
            if not is_fine:
                sentence = f"optimizer={optimizer.name} does not work with {knob}={facts.knobs[knob]}: {reason}"
                yield refusal("optimizer", sentence, f"optimizer={optimizer.fallback}, or {knob}={other}")
    if not engine.runs(strategy.name):
        runs = " and ".join(f"strategy={name}" for name in engine.strategies)
        instead = f"engine={engine.fallback} with strategy={strategy.name}, or strategy={engine.strategies[-1]}"
        yield refusal("engine", f"engine={engine.name} runs {runs} here, not strategy={strategy.name}", instead)
    if mode not in ("off", "blocks") and not strategy.compiles:
        reason = "moves weights or activations between the layers of a forward"
        works = catalog.nearest_strategy(strategy, lambda other: other.compiles)
        sentence = f"compile={mode} does not work with strategy={strategy.name}, which {reason}"
        blocks = "compile=blocks, " if strategy.name in catalog.LEVERS["compile"]["blocks"].strategies else ""
        yield refusal("compile", sentence, f"{blocks}compile=off, or compile={mode} with strategy={works}")
    if mode != "off" and not engine.compiles:
        instead = f"compile=off, or compile={mode} with engine={engine.fallback}"
        yield refusal("compile", f"engine={engine.name} does not take compile={mode}", instead)


def _levers_and_programs(facts: Facts) -> Refusals:
    """Levers that a strategy or an engine does not have."""
    for entry, value in facts.levers:
        asked, plain = f"{entry.name}={value.name}", f"{entry.name}={entry.plain}"
        for knob, ran, having, closest in (
            ("strategy", facts.strategy.name, value.strategies, _closest(facts.strategy, value.strategies)),
            ("engine", facts.engine.name, value.engines, facts.engine.fallback),
        ):
            if having and ran not in having:
                sentence = f"{asked} works with {knob} {', '.join(having)}, not with {knob}={ran}"
                yield refusal(entry.name, sentence, f"{plain}, or {knob}={closest}")
        if (mode := facts.knobs["compile"]) != "off" and not value.compiles:
            yield refusal("compile", f"{asked} does not work with compile={mode}", f"compile=off, or {plain}")
    precision, method = facts.knobs["precision"], facts.knobs["method"]
    if method in catalog.WITH_ADAPTERS and facts.strategy.shards and precision == "bf16-pure":
        sentence = f"method={method} with precision=bf16-pure has fp32 adapters beside bf16 weights, and"
        needs = f"strategy={facts.strategy.name} shards weights of one format"
        yield refusal("precision", f"{sentence} {needs}", "precision=bf16, or strategy=ddp")


def _closest(strategy: catalog.StrategyEntry, names: Iterable[str]) -> str:
    """Name of the nearest strategy among `names`."""
    return catalog.nearest_strategy(strategy, lambda other: other.name in names)


def _levers_of_the_model(facts: Facts) -> Refusals:
    """Levers that the model, its objective or the installed packages do not have."""
    family, objective = facts.config.get("model_type"), facts.spec.data.get("objective")
    for entry, value in facts.levers:
        asked, plain = f"{entry.name}={value.name}", entry.instead(value)
        if value.objectives and objective not in value.objectives:
            sentence = f"{asked} is for data.objective={' or '.join(value.objectives)}, not for {objective}"
            yield refusal(entry.name, sentence, plain)
        families = value.families or (facts.families or {}).get(value.package or "", ())
        if families and isinstance(family, str) and family not in families:
            yield refusal(entry.name, f"{asked} can do {', '.join(families)}, and the model is {family}", plain)
        install = f"install with: {facts.python} -m pip install"
        if missing := [name for name in (value.package or "").split() if not facts.versions.get(name)]:
            needs = f"{asked} needs {' and '.join(missing)}; {install} {value.install or ' '.join(missing)}"
            yield refusal(entry.name, needs, plain)
        for package, first in value.versions:
            version = facts.versions.get(package)
            if version and release(version) < release(first):
                needs = f"{asked} needs {package} {first} or later and this Python has {version}"
                yield refusal(entry.name, f"{needs}; {install} '{package}>={first}'", plain)


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version before anything else: (2, 13, 0) of `2.13.0+cu130`."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def _half_precision(facts: Facts) -> Refusals:
    """A precision that a strategy or an engine does not have; fp16 that a CPU trains as fp32, or DeepSpeed refuses."""
    strategy, engine, precision = facts.strategy, facts.engine, PRECISIONS[str(facts.knobs["precision"])]
    for knob, ran, having in (
        ("strategy", strategy.name, precision.strategies),
        ("engine", engine.name, precision.engines),
    ):
        if having and ran not in having:
            sentence = f"precision={precision.name} works with {knob} {', '.join(having)}, not with {knob}={ran}"
            yield refusal("precision", sentence, f"precision=bf16, or {knob}={having[0]}")
    if precision.name != "fp16" or not facts.on_cpu:
        return
    if not engine.fp16_on_cpu:
        sentence = f"engine={engine.name} with precision=fp16 on a CPU silently trains in fp32"
        yield refusal("precision", sentence, f"precision=bf16, or engine={engine.fallback}")
    if strategy.is_zero and not cpu_has_fp16():
        needs = "needs a CPU with AVX512-FP16, and this one has none"
        yield refusal("precision", f"precision=fp16 with strategy={strategy.name} {needs}", "precision=bf16")


COMPILER_OF_DEVICE = {"cpu": ("CXX", ("g++",), "g++"), "cuda": ("CC", ("gcc", "cc", "clang"), "gcc")}
"""The variable that names the compiler, its usual names, and its Debian package, by device."""


def _installed(facts: Facts) -> Refusals:
    """Packages and a compiler that are missing."""
    strategy, optimizer, engine = facts.strategy, facts.optimizer, facts.engine
    other_package = catalog.nearest_strategy(strategy, lambda other: other.package != strategy.package)
    precision = PRECISIONS[str(facts.knobs["precision"])]
    for knob, entry, least, instead in (
        ("precision", precision, precision.min_version, "bf16"),
        ("optimizer", optimizer, optimizer.min_version, optimizer.fallback),
        ("strategy", strategy, None, other_package),
        ("engine", engine, None, engine.fallback),
    ):
        needs, install = f"{knob}={entry.name} needs {entry.package}", f"install with: {facts.python} -m pip install"
        has = facts.versions.get(entry.package or "")
        if entry.package is not None and not has:
            yield refusal(knob, f"{needs}; {install} {entry.package}", f"{knob}={instead}")
        elif has and least and release(has) < release(least):
            needs = f"{needs} {least} or later, and {facts.python} has {has}"
            yield refusal(knob, f"{needs}; {install} '{entry.package}>={least}'", f"{knob}={instead}")
    mode = facts.knobs["compile"]
    knob, instead = ("compile", "off") if mode != "off" else ("optimizer", optimizer.fallback)
    compiles = mode != "off" or optimizer.compiles
    variable, names, package = COMPILER_OF_DEVICE[facts.machine.device]
    chosen = os.environ.get(variable)
    path = search_path(facts.python) if compiles else ""
    if compiles and not any(shutil.which(name, path=path) for name in ((chosen,) if chosen else names)):
        missing = f"PATH has no {chosen or ' or '.join(names)}; install with: apt-get install {package}"
        yield refusal(knob, f"{knob}={facts.knobs[knob]} needs a compiler, and {missing}", f"{knob}={instead}")


def _links(facts: Facts) -> Refusals:
    """`p2p=off`, a setting of NCCL, with a strategy that does not use NCCL.

    Of the strategies of one process only dp sums its gradients by NCCL (torch's nn/parallel/comm.py, reduce_add).
    """
    strategy = facts.strategy
    if facts.knobs["p2p"] == "off" and strategy.no_nccl_reason:
        sentence = f"p2p=off does nothing with strategy={strategy.name}: it closes links to NCCL, and"
        instead = f"p2p=on, or strategy={strategy.fallback} with p2p=off"
        yield refusal("p2p", f"{sentence} {strategy.no_nccl_reason}", instead)


def _model_sizes(facts: Facts) -> Refusals:
    """Sizes that the model cannot have, each with the nearest that it can."""
    config, data, objective = facts.config, facts.spec.data, facts.spec.data["objective"]
    seq_len = whole_number(facts.knobs, "seq_len")
    nested = config.get("text_config")
    texts = {**config, **nested} if isinstance(nested, dict) else config
    field, positions = device_counts.first_size(texts, "n_positions", "max_position_embeddings")
    # T5's positions are relative: its `n_positions` is without effect.
    has_positions = objective != "image-classification" and "relative_attention_num_buckets" not in config
    if has_positions and 0 < positions < (needed := positions_needed(objective, seq_len)):
        instead = f"seq_len={longest_seq_len(objective, positions)}, or model.{field}={needed}"
        yield refusal("seq_len", f"seq_len={seq_len} is longer than the model's model.{field}={positions}", instead)
    # A tokenizer trained on the text starts from every byte.
    vocab = config.get("vocab_size")
    trained = data.get("kind") not in ("random", "jpeg") and not data.get("tokenizer") and "family" in facts.spec.model
    if trained and isinstance(vocab, int) and vocab < SMALLEST_VOCAB:
        sentence = f"model.vocab_size={vocab} is too small: a byte-level BPE needs at least {SMALLEST_VOCAB}"
        instead = f"model.vocab_size={SMALLEST_VOCAB}, or data.kind=random"
        yield refusal("model.vocab_size", sentence, instead, [f"{SMALLEST_VOCAB} or more"])
    _, width = device_counts.first_size(config, "hidden_size", "n_embd")
    field, heads = device_counts.first_size(config, "num_attention_heads", "n_head")
    if width and heads and not config.get("head_dim") and width % heads:
        divisors = [count for count in range(1, width + 1) if width % count == 0]
        sentence = f"the hidden size {width} is not divisible by model.{field}={heads}"
        closest = min(divisors, key=lambda count: abs(count - heads))
        yield refusal(f"model.{field}", sentence, f"model.{field}={closest}")


def _pipeline(facts: Facts) -> Refusals:
    """Models that cannot be cut into stages, and more stages than layers."""
    strategy, family, objective = facts.strategy, facts.config.get("model_type"), facts.spec.data.get("objective")
    if not strategy.is_pipeline:
        return
    cuts = f"strategy={strategy.name} can cut"
    if isinstance(family, str) and family not in catalog.PIPELINE_OBJECTIVES:
        sentence = f"{cuts} {', '.join(catalog.PIPELINE_OBJECTIVES)} into stages, and the model is {family}"
        yield refusal("strategy", sentence, "strategy=ddp or strategy=fsdp")
    elif isinstance(family, str) and objective not in catalog.PIPELINE_OBJECTIVES[family]:
        objectives = f"data.objective={' or '.join(catalog.PIPELINE_OBJECTIVES[family])}"
        sentence = f"{cuts} {family} into stages for {objectives}, not for data.objective={objective}"
        yield refusal("strategy", sentence, "strategy=ddp")
    degree, schedule = whole_number(facts.knobs, "pp_degree"), str(facts.knobs["pp_schedule"])
    stages = degree * catalog.SCHEDULES[schedule].stages_per_rank
    field, layers = device_counts.first_size(facts.config, "num_hidden_layers", "n_layer")
    than_layers = f"more than the model's {layers} layers (model.{field})"
    if 0 < layers < degree:
        instead = f"pp_degree={layers}" if layers > 1 else "strategy=ddp"
        yield refusal("pp_degree", f"pp_degree={degree} is {than_layers}", instead)
    elif 0 < layers < stages:
        sentence = f"pp_schedule=interleaved with pp_degree={degree} makes {stages} stages, {than_layers}"
        yield refusal("pp_schedule", sentence, "pp_schedule=1f1b")


def _micro_batches(facts: Facts) -> Refusals:
    """A batch that does not divide into equal micro-batches, or not into as many as the schedule takes."""
    batch, chunks, degree = (whole_number(facts.knobs, name) for name in ("batch_size", "micro_batches", "pp_degree"))
    schedule = str(facts.knobs["pp_schedule"])
    if not facts.strategy.is_pipeline:
        return
    counts = [count for count in range(1, batch + 1) if batch % count == 0 and _runs(schedule, count, degree)]
    closest = min(counts, key=lambda count: abs(count - chunks), default=None)
    instead = f"micro_batches={closest}" if closest else f"batch_size={degree}, micro_batches={degree}"
    if batch % chunks:
        sentence = f"batch_size={batch} cannot be cut into micro_batches={chunks} equal parts"
        yield refusal("micro_batches", sentence, instead)
    elif not _runs(schedule, chunks, degree):
        need = f"needs at least pp_degree={degree} micro-batches, and micro_batches={chunks}"
        if schedule == "interleaved":
            rounds = max(1, chunks // degree)
            need = f"runs {rounds} equal rounds with pp_degree={degree}, and micro_batches={chunks} does not split"
        yield refusal("micro_batches", f"pp_schedule={schedule} {need}", f"{instead}, or pp_schedule=gpipe")


def _runs(schedule: str, chunks: int, degree: int) -> bool:
    """True if torch's schedule takes that many micro-batches.

    The rounds are `number_of_rounds` of torch's ScheduleInterleaved1F1B.
    """
    if schedule == "1f1b":
        return chunks >= degree
    return schedule == "gpipe" or chunks % max(1, chunks // degree) == 0


SIZES_CUT = {
    **dict.fromkeys(("num_attention_heads", "n_head"), "heads"),
    "num_key_value_heads": "key-value heads",
    **dict.fromkeys(("intermediate_size", "n_inner"), "columns of its MLP"),
}
"""Fields of a model's configuration that tensor parallelism divides, each with its unit."""


def _tensor_parallel(facts: Facts) -> Refusals:
    """Models without a plan, and degrees that do not divide them."""
    strategy, family = facts.strategy, facts.config.get("model_type")
    plan: Any = facts.config.get("base_model_tp_plan")
    if not strategy.is_tensor_parallel:
        return
    instead = f"strategy={catalog.nearest_strategy(strategy, lambda other: not other.is_tensor_parallel)}"
    is_ours = not isinstance(family, str) or family in catalog.OUR_TENSOR_PLANS
    if not is_ours and not plan:
        theirs = "transformers ships none (it does for llama, mistral, mixtral, qwen3, gemma3_text, gpt_neox)"
        ours = f"ours are for {' and '.join(sorted(catalog.OUR_TENSOR_PLANS))}"
        yield refusal("strategy", f"strategy={strategy.name} has no plan for {family}: {theirs}, and {ours}", instead)
    elif not is_ours and (unknown := sorted({*plan.values()} - catalog.TENSOR_STYLES)):
        cuts = f"the plan of {family} cuts layers as {', '.join(unknown)}, which is not done here"
        yield refusal("strategy", f"strategy={strategy.name}: {cuts}", instead)
    degree = whole_number(facts.knobs, "tp_degree")
    for field, unit in SIZES_CUT.items():
        size = facts.config.get(field)
        if isinstance(size, int) and size % degree:
            degrees = [count for count in range(2, degree) if size % count == 0]
            sentence = f"tp_degree={degree} does not divide the model's {size} {unit} (model.{field})"
            yield refusal("tp_degree", sentence, f"tp_degree={degrees[-1]}" if degrees else instead)


def _sequence_parallel(facts: Facts) -> Refusals:
    """Families whose sequence cannot be split, and sequences that do not divide."""
    family, asked = facts.config.get("model_type"), "sequence_parallel=on"
    degree, seq_len = (whole_number(facts.knobs, name) for name in ("tp_degree", "seq_len"))
    if "sequence_parallel" not in facts.strategy.knobs or facts.knobs["sequence_parallel"] != "on":
        return
    instead = "sequence_parallel=off"
    if isinstance(family, str) and family not in catalog.SEQUENCE_FAMILIES:
        sentence = f"{asked} can split {', '.join(catalog.SEQUENCE_FAMILIES)}, and the model is {family}"
        yield refusal("sequence_parallel", sentence, instead)
    if (samples := facts.knobs["samples"]) != "packed":
        sentence = f"{asked} splits sequences of one length, and samples={samples} are of several"
        yield refusal("sequence_parallel", sentence, f"samples=packed, or {instead}")
    if seq_len % degree:
        longer = seq_len + degree - seq_len % degree
        sentence = f"{asked} splits seq_len={seq_len} into tp_degree={degree} equal parts, and it does not divide"
        yield refusal("seq_len", sentence, f"seq_len={longer}, or {instead}")


def _expert_degree(facts: Facts) -> Refusals:
    """Experts over another number of devices than share a layer."""
    degree, experts = (whole_number(facts.knobs, name) for name in ("tp_degree", "ep_degree"))
    if "ep_degree" in facts.strategy.knobs and experts not in (1, degree):
        sentence = f"ep_degree={experts} is not tp_degree={degree}: the devices that share a layer share its experts"
        yield refusal("ep_degree", sentence, f"ep_degree={degree}, or ep_degree=1")


def _expert_parallel(facts: Facts) -> Refusals:
    """Models whose experts cannot be spread, and degrees that do not divide them."""
    degree, family = whole_number(facts.knobs, "ep_degree"), facts.config.get("model_type")
    plan: Any = facts.config.get("base_model_ep_plan") or {}
    if "ep_degree" not in facts.strategy.knobs or degree == 1:
        return
    asked, instead = f"ep_degree={degree}", "ep_degree=1"
    if isinstance(family, str) and not plan:
        known = "transformers ships none (it does for mixtral, qwen2_moe, qwen3_moe, deepseek_v3)"
        yield refusal("ep_degree", f"{asked} has no plan for the experts of {family}: {known}", instead)
    elif unknown := sorted({*plan.values()} - catalog.EXPERT_STYLES):
        spreads = f"the plan of {family} spreads experts as {', '.join(unknown)}, which is not done here"
        yield refusal("ep_degree", f"{asked}: {spreads}", instead)
    for field in ("num_local_experts", "num_experts", "n_routed_experts"):
        count = facts.config.get(field)
        if isinstance(count, int) and count % degree:
            yield refusal("ep_degree", f"{asked} does not divide the model's {count} experts (model.{field})", instead)


def _offloading(facts: Facts) -> Refusals:
    """An `offload_path` that takes no files, without ZeRO-3, or where DeepSpeed's extension cannot be built."""
    path, strategy = facts.knobs["offload_path"], facts.strategy.name
    if path is None or not facts.strategy.is_zero:
        return
    offloads, elsewhere = f"offload_path={path}", "a directory on a disk with free space"
    if "offload_path" not in facts.strategy.knobs:
        sentence = f"{offloads} does nothing with strategy={strategy}: DeepSpeed offloads to a disk in ZeRO-3 only"
        obeying = " or ".join(catalog.strategies_obeying("offload_path"))
        yield refusal("offload_path", sentence, f"strategy={obeying}, or leaving offload_path out")
    folder = Path(os.path.expanduser(str(path)))
    if not folder.is_dir():
        is_file = folder.exists()
        sentence = f"{offloads} {'is a file' if is_file else 'does not exist'}; strategy={strategy} needs a directory"
        instead = f"offload_path={folder.parent}" if is_file else f"mkdir -p {path}"
        yield refusal("offload_path", f"{sentence} to put states in", instead)
        return
    if (reason := _closed_to_us(folder)) is not None:
        sentence = f"{offloads} {reason}, and strategy={strategy} writes there"
        yield refusal("offload_path", sentence, "a directory of your own on the NVMe disk")
    if (available_bytes := free_bytes(folder)) < DISK_FULL_BELOW_BYTES:
        yield refusal("offload_path", f"{offloads} is full: {mebibytes(available_bytes)} free", elsewhere)
    missing = missing_tool(facts.python)
    if missing is None and not has_libaio(facts.python):
        missing = "libaio with its header", "apt-get install libaio-dev"
    if missing is not None:
        builds = f"builds with {missing[0]}; install with: {missing[1]}"
        instead = "leaving offload_path out: the states stay in host memory"
        yield refusal("offload_path", f"{offloads} needs DeepSpeed's async_io extension, which {builds}", instead)


def refuse_small_disk(knobs: KnobValues, parameters: int | None) -> None:
    """Raise UserError for an `offload_path` without space for weights and states; return when the size is unknown.

    The weights in the states' precision and the optimizer's states: with AdamW in fp32 12 bytes a parameter. A real
    run of 3,344,064 parameters wrote 14.
    """
    folder = offload_folder(knobs)
    if folder is None or parameters is None:
        return
    width = PRECISIONS[str(knobs["precision"])].weight_bytes
    needed_bytes = parameters * width * (1 + catalog.OPTIMIZERS[str(knobs["optimizer"])].state_tensors)
    available_bytes = free_bytes(folder)
    if available_bytes < needed_bytes:
        sentence = f"offload_path={knobs['offload_path']} has {mebibytes(available_bytes)} free;"
        states = f"the states of {parameters:,} parameters take {mebibytes(needed_bytes)}"
        raise refusal("offload_path", f"{sentence} {states}", "a directory on a disk with free space")


def _closed_to_us(folder: Path) -> str | None:
    """Reason to refuse `folder`; None for a directory that is this user's, or shared with them."""
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return "cannot be written"
    status = folder.stat()
    # Root passes `os.access` everywhere, so the owner is checked too.
    if status.st_uid != os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"belongs to {owner_of(folder)}"
    return None


EVERY_MODELS_ATTENTION = ("auto", "eager")
"""Values of `attention` that every model has."""
ATTENTION_DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop")
"""Fields of transformers' configurations with the dropout of attention."""
POSITION_BIAS = "relative_attention_num_buckets"
"""Field of models like T5, which train a bias for each distance between two positions."""
READS_IMAGES = frozenset({"image_size", "num_channels", "vision_config"})
"""Fields of a model's configuration, one of which each model that reads images has."""


def _data(facts: Facts) -> Refusals:
    """Data for another objective, another model or another strategy."""
    config, data, model = facts.config, facts.spec.data, facts.config.get("model_type")
    kind, objective, samples = data["kind"], data["objective"], facts.knobs["samples"]
    is_jpeg, images = kind == "jpeg", "data.kind=jpeg with data.objective=image-classification"
    if is_jpeg != (objective == "image-classification"):
        sentence = f"data.kind={kind} does not work with data.objective={objective}:"
        instead = images if is_jpeg else "data.kind=jpeg, or data.objective=causal-lm"
        yield refusal("data.kind", f"{sentence} jpeg is for image-classification, text for the others", instead)
    if model is not None and is_jpeg and "vocab_size" in config and READS_IMAGES.isdisjoint(config):
        sentence = f"data.kind=jpeg needs a model that reads images, and {model} reads text"
        yield refusal("data.kind", sentence, "model.family=vit, or data.kind=text")
    if model is not None and not is_jpeg and objective == "seq2seq" and not config.get("is_encoder_decoder"):
        sentence = f"data.objective=seq2seq needs an encoder and a decoder, and {model} does not have both"
        yield refusal("data.objective", sentence, "model.family=t5, or data.objective=causal-lm")
    if model is not None and not is_jpeg and "vocab_size" not in config and "text_config" not in config:
        sentence = f"data.kind={kind} is text, and {model} does not read text: it has no vocab_size"
        yield refusal("data.kind", sentence, images)
    reason = None
    if kind in ("random", "jpeg"):
        reason = f"samples of data.kind={kind} are all of one length"
    elif objective == "seq2seq":
        reason = "data.objective=seq2seq cuts packed samples in two halves"
    elif facts.strategy.is_pipeline and objective != "causal-lm":
        reason = f"data.objective={objective} needs a padding mask, and strategy={facts.strategy.name} passes none on"
    if samples != "packed" and reason is not None:
        yield refusal("samples", f"samples={samples} cannot be used: {reason}", "samples=packed")
    # A schedule's buffers and a compiled graph are made for one shape.
    fixed = "strategy" if facts.strategy.is_pipeline else "compile"
    if samples == "grouped" and (facts.strategy.is_pipeline or facts.knobs["compile"] != "off"):
        sentence = f"samples=grouped does nothing with {fixed}={facts.knobs[fixed]}, which pads every batch to seq_len"
        yield refusal("samples", sentence, "samples=padded, or samples=packed")


def _attention(facts: Facts) -> Refusals:
    """Kernels that the precision, the samples or the model does not have."""
    attention, precision = str(facts.knobs["attention"]), str(facts.knobs["precision"])
    halves = not facts.on_cpu and catalog.LEVERS["attention"][attention].halves_on_gpus
    if halves and not PRECISIONS[precision].computes_in_half:
        half = "bf16" if precision == "tf32" else "fp16"
        instead = f"attention=sdpa, or attention={attention} with precision={half}"
        yield refusal("attention", f"attention={attention} has no kernel for precision={precision}", instead)
    if attention == "sdpa-flash":
        yield from _sdpa_flash(facts)
    if facts.attentions is not None and attention not in facts.attentions:
        model, kernel = facts.config.get("model_type", "this model"), "sdpa" if "sdpa" in facts.attentions else "eager"
        instead = f"attention=auto, which takes {kernel}"
        yield refusal("attention", f"{model} has no attention={attention}", instead, facts.attentions)


def _sdpa_flash(facts: Facts) -> Refusals:
    """torch's flash kernel takes no mask on a GPU, no dropout on a CPU, no trained bias on either."""
    samples, needs = facts.knobs["samples"], "attention=sdpa-flash takes no"
    if not facts.on_cpu and samples != "packed":
        sentence = f"{needs} mask, and samples={samples} are padded"
        yield refusal("attention", sentence, "attention=sdpa, or samples=packed")
    if POSITION_BIAS in facts.config:
        yield refusal("attention", f"{needs} bias, and the model adds one to its scores", "attention=sdpa")
    elif facts.on_cpu and (field := next(filter(facts.config.get, ATTENTION_DROPOUTS), None)) is not None:
        sentence = f"{needs} dropout on a CPU, and the model has {field}={facts.config[field]:g}"
        yield refusal("attention", sentence, f"attention=sdpa, or model.{field}=0")


def _warmup(facts: Facts) -> Refusals:
    """A timing warm-up that leaves no step to measure."""
    steps, warmup = (whole_number(facts.knobs, name) for name in ("steps", "timing_warmup"))
    if warmup >= steps:
        sentence = f"timing_warmup={warmup} leaves no step of steps={steps} to measure"
        yield refusal("timing_warmup", sentence, f"timing_warmup={max(0, min(3, steps - 1))}")


DEVICE_RULES: tuple[Rules, ...] = (_devices, _hardware)
"""Rules that look at devices only, and at what they compute with."""
VALUE_RULES: tuple[Rules, ...] = (_hardware, _entries_on_a_cpu, _link_on_a_cpu)
"""Rules by which one value cannot work on the devices asked for, whatever the other knobs are."""
KNOB_RULES: tuple[Rules, ...] = (
    *(_ranks, _micro_batches, _expert_degree, _programs, _entries_on_a_cpu, _levers_and_programs),
)
"""Rules that look at knobs and the number of devices: no other model, GPU or package would help."""
MODEL_RULES: tuple[Rules, ...] = (
    *(_link_on_a_cpu, _links, _half_precision, _model_sizes, _installed, _pipeline),
    *(_tensor_parallel, _sequence_parallel, _expert_parallel, _offloading, _data, _levers_of_the_model, _attention),
)
"""Further rules: they look at the model, its data, the installed packages and the disk as well."""


def check(facts: Facts) -> None:
    """Check the settings against every rule. Raises the UserError of the first that refuses."""
    for error in _refusals((_warmup, *DEVICE_RULES, *KNOB_RULES, *MODEL_RULES), facts):
        raise error


def refusal_here(spec: RunSpec, machine: Machine) -> UserError | None:
    """The refusal of a run for which this machine lacks the devices; None when it has them."""
    return next(_refusals(DEVICE_RULES, _facts_of(spec, machine)), None)


def refusal_anywhere(spec: RunSpec, machine: Machine) -> UserError | None:
    """The refusal of knobs that contradict each other; None when they do not, or this machine lacks the devices.

    A CPU is on every machine: what cannot run on it contradicts a `devices` that asks for it.
    """
    error = refusal_here(spec, machine)
    if error is not None:
        return error if asks_for_cpu(spec.knobs["devices"]) else None
    return next(_refusals(KNOB_RULES, _facts_of(spec, machine)), None)


def refused_values(name: str, spec: RunSpec, machine: Machine) -> dict[KnobValue, str]:
    """Return the values of a knob that cannot work on the devices asked for, each with the reason."""
    values = KNOBS_BY_NAME[name].values
    reasons: dict[KnobValue, str] = {}
    for value in values.options if isinstance(values, Choice) else ():
        asked = replace(spec, knobs={**defaults(), **spec.knobs, name: value})
        for error in _refusals(VALUE_RULES, _facts_of(asked, machine)):
            if error.key == name:
                reasons.setdefault(value, error.message)
    return reasons


def _facts_of(spec: RunSpec, machine: Machine) -> Facts:
    """The facts without a model and its packages."""
    return Facts(spec, machine.used_by(spec.knobs["devices"]), config={}, versions={}, python="")


def _refusals(groups: Iterable[Rules], facts: Facts) -> Refusals:
    """Yield the refusals by these groups of rules, those that a group raises among them."""
    for rules in groups:
        try:
            yield from rules(facts)
        except UserError as error:
            yield error
