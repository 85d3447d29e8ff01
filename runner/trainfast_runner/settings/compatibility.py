"""Refuse settings that cannot work together before launch: the error names both, and the nearest that can."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainfast_runner.errors import UserError
from trainfast_runner.machine.cpu import cpu_has_fp16
from trainfast_runner.machine.devices import VISIBLE_DEVICES, Machine
from trainfast_runner.machine.devices_knob import CPU, asks_for_cpu, count_asked, cpu_processes
from trainfast_runner.machine.training_python import has_libaio, missing_tool, search_path
from trainfast_runner.records.json_lines import owner_of
from trainfast_runner.records.tick import is_instance
from trainfast_runner.settings.device_counts import chosen_gpus, device_count, devices_asked, first_size, world_size
from trainfast_runner.settings.knob_values import (
    MAX_CPU_PROCESSES,
    Choice,
    KnobValue,
    KnobValues,
    parse_bytes_per_rank,
    whole_number,
)
from trainfast_runner.settings.knobs import KNOBS_BY_NAME, defaults
from trainfast_runner.settings.precisions import PRECISIONS
from trainfast_runner.settings.spec import RunSpec, offload_folder
from trainfast_runner.units import mebibytes
from trainfast_runner.worker.catalog import (
    ENGINES,
    OPTIMIZERS,
    SCHEDULES,
    STRATEGIES,
    EngineEntry,
    OptimizerEntry,
    StrategyEntry,
    nearest_optimizer,
    nearest_strategy,
    strategies_obeying,
)
from trainfast_runner.worker.shared.host import DISK_FULL_BELOW_BYTES, free_bytes
from trainfast_runner.worker.shared.parallel_plans import OUR_TENSOR_PLANS, PIPELINE_OBJECTIVES, TENSOR_STYLES
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

    @property
    def knobs(self) -> KnobValues:
        """The knobs asked for."""
        return self.spec.knobs

    @property
    def strategy(self) -> StrategyEntry:
        """The catalog's entry of the strategy."""
        return STRATEGIES[str(self.knobs["strategy"])]

    @property
    def optimizer(self) -> OptimizerEntry:
        """The catalog's entry of the optimizer."""
        return OPTIMIZERS[str(self.knobs["optimizer"])]

    @property
    def engine(self) -> EngineEntry:
        """The catalog's entry of the engine."""
        return ENGINES[str(self.knobs["engine"])]

    @property
    def rank_count(self) -> int:
        """Number of processes the run starts."""
        return world_size(self.spec, self.machine)

    @property
    def device_count(self) -> int:
        """Number of devices the run uses."""
        return device_count(self.spec, self.machine)


Rule = Callable[[Facts], None]
"""Raises UserError for settings that cannot work together."""


def strategy_has_gpus(facts: Facts) -> None:
    """Refuse a strategy of one process over several devices where fewer than two GPUs are used."""
    entry, asked_devices = facts.strategy, facts.knobs["devices"]
    if entry.needs_gpus_reason is None:
        return
    requirement = f"strategy={entry.name} {entry.needs_gpus_reason}"
    if asks_for_cpu(asked_devices):
        on_cpu = asked_devices if (cpu_processes(asked_devices) or 0) > 1 else f"{CPU}:2"
        raise UserError(
            f"{requirement}, and devices={asked_devices} asks for the CPU",
            key="strategy",
            advice=f"strategy={entry.fallback} with devices={on_cpu}",
        )
    if facts.machine.device != "cuda":
        raise UserError(
            f"{requirement}, and a run here has none ({facts.machine.no_gpu_reason})",
            key="strategy",
            advice=f"strategy={entry.fallback}",
        )
    if facts.device_count < 2:
        raise UserError(
            f"{requirement}, and devices={asked_devices or 'auto'} is one",
            key="devices",
            advice="devices=2 where there are two, or strategy=single",
        )


def devices_fill_the_mesh(facts: Facts) -> None:
    """Refuse a number of devices that does not hold whole copies of the model."""
    entry = facts.strategy
    axis = entry.model_axis
    if axis is None:
        return
    degree = whole_number(facts.knobs, f"{axis}_degree")
    device_count = facts.device_count
    requirement = f"strategy={entry.name} with {axis}_degree={degree}"
    if "dp" not in entry.axes and device_count != degree:
        raise UserError(
            f"{requirement} runs on {degree} devices, not on devices={device_count}",
            key="devices",
            advice=f"devices={degree}" + (f", or {axis}_degree={device_count}" if device_count > 1 else ""),
        )
    if "dp" in entry.axes and (device_count % degree or device_count == degree):
        raise UserError(
            f"{requirement} needs a multiple of {degree} devices, at least {2 * degree}; devices={device_count} is not",
            key="devices",
            advice=f"devices={2 * degree}, or strategy={axis} with devices={degree}",
        )


def optimizer_takes_the_parameters(facts: Facts) -> None:
    """Refuse an optimizer that cannot take the parameters as the strategy keeps them."""
    entry = facts.optimizer
    refusal = entry.refusal(facts.strategy)
    if refusal is not None:
        takes = nearest_strategy(facts.strategy, lambda strategy: entry.refusal(strategy) is None)
        raise UserError(
            f"optimizer={entry.name} {refusal}",
            key="optimizer",
            allowed=[name for name, optimizer in OPTIMIZERS.items() if optimizer.refusal(facts.strategy) is None],
            advice=f"optimizer={nearest_optimizer(entry, facts.strategy)},"
            f" or strategy={takes} with optimizer={entry.name}",
        )


def optimizer_has_gpus(facts: Facts) -> None:
    """Refuse an optimizer that needs a GPU on a CPU."""
    entry = facts.optimizer
    if entry.needs_gpus_reason and facts.machine.device == "cpu":
        raise UserError(
            f"optimizer={entry.name} {entry.needs_gpus_reason}, and this run is on the CPU",
            key="optimizer",
            advice=f"optimizer={entry.fallback}",
        )


def engine_runs_the_strategy(facts: Facts) -> None:
    """Refuse a strategy that the engine cannot run."""
    entry, strategy = facts.engine, facts.strategy
    if entry.runs(strategy.name):
        return
    runs = " and ".join(f"strategy={name}" for name in entry.strategies)
    raise UserError(
        f"engine={entry.name} runs {runs} here, not strategy={strategy.name}",
        key="engine",
        advice=f"engine={entry.fallback} with strategy={strategy.name}, or strategy={entry.strategies[-1]}",
    )


def compile_fits(facts: Facts) -> None:
    """Refuse `compile` for a strategy or an engine that does not compile its model."""
    mode = facts.knobs["compile"]
    engine = facts.engine
    strategy = facts.strategy
    if mode == "off":
        return
    if not strategy.compiles:
        works = nearest_strategy(strategy, lambda other: other.compiles)
        raise UserError(
            f"compile={mode} does not work with strategy={strategy.name}, which moves weights or activations between"
            " the layers of a forward",
            key="compile",
            advice=f"compile=off, or compile={mode} with strategy={works}",
        )
    if not engine.compiles:
        raise UserError(
            f"engine={engine.name} does not take compile={mode}",
            key="compile",
            advice=f"compile=off, or compile={mode} with engine={engine.fallback}",
        )


def _engine_has_fp16_on_a_cpu(facts: Facts) -> None:
    engine = facts.engine
    if facts.knobs["precision"] == "fp16" and facts.machine.device == "cpu" and not engine.fp16_on_cpu:
        raise UserError(
            f"engine={engine.name} with precision=fp16 on a CPU silently trains in fp32",
            key="precision",
            advice=f"precision=bf16, or engine={engine.fallback}",
        )


def _packages_are_installed(facts: Facts) -> None:
    strategy, optimizer, engine = facts.strategy, facts.optimizer, facts.engine
    for knob, name, package, instead in (
        ("optimizer", optimizer.name, optimizer.package, optimizer.fallback),
        (
            "strategy",
            strategy.name,
            strategy.package,
            nearest_strategy(strategy, lambda other: other.package != strategy.package),
        ),
        ("engine", engine.name, engine.package, engine.fallback),
    ):
        if package is not None and not facts.versions.get(package):
            raise UserError(
                f"{knob}={name} needs {package}; install with: {facts.python} -m pip install {package}",
                key=knob,
                advice=f"{knob}={instead}",
            )


def link_has_gpus(facts: Facts) -> None:
    """Refuse `p2p=off` on a CPU."""
    if facts.knobs["p2p"] == "off" and facts.machine.device == "cpu":
        raise UserError(
            "p2p=off closes the direct link between GPUs: it needs two GPUs, and this run is on the CPU",
            key="p2p",
            advice="p2p=on",
        )


def _link_is_of_nccl(facts: Facts) -> None:
    """Refuse `p2p=off`, a setting of NCCL, with a strategy that does not use NCCL.

    Of the strategies of one process only dp sums its gradients by NCCL (torch's nn/parallel/comm.py, reduce_add).
    """
    entry = facts.strategy
    if facts.knobs["p2p"] == "off" and entry.no_nccl_reason:
        raise UserError(
            f"p2p=off does nothing with strategy={entry.name}: it closes links to NCCL, and {entry.no_nccl_reason}",
            key="p2p",
            advice=f"p2p=on, or strategy={entry.fallback} with p2p=off",
        )


READS_IMAGES = frozenset({"image_size", "num_channels", "vision_config"})
"""Fields of a model's configuration, one of which each model that reads images has."""


def _images_are_classified(facts: Facts) -> None:
    kind, objective = facts.spec.data["kind"], facts.spec.data["objective"]
    if (kind == "jpeg") != (objective == "image-classification"):
        text = "data.kind=jpeg, or data.objective=causal-lm"
        images = "data.kind=jpeg with data.objective=image-classification"
        raise UserError(
            f"data.kind={kind} does not work with data.objective={objective}:"
            " jpeg is for image-classification, text for the others",
            key="data.kind",
            advice=images if kind == "jpeg" else text,
        )


def _model_takes_the_data(facts: Facts) -> None:
    config, data = facts.config, facts.spec.data
    model = config.get("model_type")
    if model is None:
        return
    if data["kind"] == "jpeg":
        if "vocab_size" not in config or not READS_IMAGES.isdisjoint(config):
            return
        raise UserError(
            f"data.kind=jpeg needs a model that reads images, and {model} reads text",
            key="data.kind",
            advice="model.family=vit, or data.kind=text",
        )
    if data["objective"] == "seq2seq" and not config.get("is_encoder_decoder"):
        raise UserError(
            f"data.objective=seq2seq needs an encoder and a decoder, and {model} does not have both",
            key="data.objective",
            advice="model.family=t5, or data.objective=causal-lm",
        )
    if "vocab_size" not in config and "text_config" not in config:
        raise UserError(
            f"data.kind={data['kind']} is text, and {model} does not read text: it has no vocab_size",
            key="data.kind",
            advice="data.kind=jpeg with data.objective=image-classification",
        )


def _texts_vary_in_length(facts: Facts) -> None:
    data, strategy = facts.spec.data, facts.strategy
    samples = data.get("samples", "packed")
    if samples == "packed":
        return
    reason = None
    if data["kind"] in ("random", "jpeg"):
        reason = f"samples of data.kind={data['kind']} are all of one length"
    elif data["objective"] == "seq2seq":
        reason = "data.objective=seq2seq cuts packed samples in two halves"
    elif strategy.is_pipeline and data["objective"] != "causal-lm":
        reason = f"data.objective={data['objective']} needs a padding mask, and strategy={strategy.name} passes none on"
    if reason is not None:
        raise UserError(
            f"data.samples={samples} cannot be used: {reason}", key="data.samples", advice="data.samples=packed"
        )


def _warmup_leaves_steps(facts: Facts) -> None:
    steps, warmup = facts.knobs["steps"], facts.knobs["timing_warmup"]
    if isinstance(steps, int) and isinstance(warmup, int) and warmup >= steps:
        raise UserError(
            f"timing_warmup={warmup} leaves no step of steps={steps} to measure",
            key="timing_warmup",
            advice=f"timing_warmup={max(0, min(3, steps - 1))}",
        )


def devices_exist(facts: Facts) -> None:
    """Refuse devices that do not exist, to train on or to watch."""
    devices = devices_asked(facts.knobs)
    machine = facts.machine
    if machine.refusal is not None:
        raise machine.refusal
    chosen = chosen_gpus(facts.knobs, machine).gpus
    machine.watched(facts.knobs["watch"], chosen)
    if machine.device == "cuda":
        return
    if isinstance(devices, str) and not asks_for_cpu(devices):
        raise UserError(
            f"devices={devices} names GPUs and a run here has none ({machine.no_gpu_reason});"
            " without a GPU devices is a count of processes",
            key="devices",
            allowed=[f"1 to {MAX_CPU_PROCESSES}"],
        )
    count = _cpu_processes(facts)
    if count > MAX_CPU_PROCESSES:
        raise UserError(
            f"devices={count}: at most {MAX_CPU_PROCESSES} processes on a CPU",
            key="devices",
            allowed=[f"1 to {MAX_CPU_PROCESSES}"],
            advice=f"devices={MAX_CPU_PROCESSES}",
        )


def _cpu_processes(facts: Facts) -> int:
    """Return the number of processes asked for on the CPU."""
    count = count_asked(devices_asked(facts.knobs))
    return facts.rank_count if count is None else count


def strategy_uses_all_devices(facts: Facts) -> None:
    """Refuse several devices for a strategy that uses one."""
    if not facts.strategy.one_device:
        return
    on_gpus = facts.machine.device == "cuda"
    count = len(chosen_gpus(facts.knobs, facts.machine).gpus) if on_gpus else _cpu_processes(facts)
    if count > 1:
        devices = devices_asked(facts.knobs)
        several = nearest_strategy(facts.strategy, lambda strategy: not strategy.one_device)
        raise UserError(
            f"strategy={facts.strategy.name} trains on one device and devices={devices} asks for {count}",
            key="strategy",
            advice=f"strategy={several} with devices={devices}, or devices=1",
        )


def precision_has_hardware(facts: Facts) -> None:
    """Refuse tf32 on a CPU, and tf32, bf16 and bf16-pure on a GPU before Ampere."""
    precision = str(facts.knobs["precision"])
    if precision == "tf32" and facts.machine.device == "cpu":
        raise UserError(
            "precision=tf32 is a format of NVIDIA tensor cores and this run is on the CPU",
            key="precision",
            advice="precision=fp32 or precision=bf16",
        )
    entry = PRECISIONS[precision]
    if facts.machine.device == "cpu" or entry.min_compute_capability == (0, 0):
        return
    for gpu in chosen_gpus(facts.knobs, facts.machine).gpus:
        if not entry.runs_on(gpu.compute_capability):
            raise UserError(
                f"precision={precision} needs compute capability {'.'.join(map(str, entry.min_compute_capability))}"
                f" or later and GPU {gpu.index}, {gpu.name or 'name unknown'}, has {gpu.compute_capability}",
                key="precision",
                advice="precision=fp16",
            )


def limit_for_every_rank(facts: Facts) -> None:
    """Refuse a list of limits without exactly one for each rank."""
    limit = facts.knobs["memory_limit"]
    if not isinstance(limit, str):
        return
    figures, ranks = len(parse_bytes_per_rank(limit)), facts.rank_count
    if figures not in (1, ranks):
        raise UserError(
            f"memory_limit={limit} names {figures} ranks and the run has {ranks}",
            key="memory_limit",
            allowed=["one value"] if ranks == 1 else ["one value", f"{ranks} values joined by +"],
        )


def overrides_take_effect(facts: Facts) -> None:
    """Refuse an override that has no effect with this strategy."""
    strategy = facts.knobs["strategy"]
    for name in facts.spec.overrides:
        entry = KNOBS_BY_NAME.get(name)
        if entry is not None and not entry.applies(facts.knobs):
            raise UserError(
                f"{name} does nothing with strategy={strategy}; it belongs to strategy {' or '.join(entry.only_with)}",
                key=name,
                advice=f"leaving {name} out",
            )


def _positions_suffice(facts: Facts) -> None:
    """Refuse a `seq_len` beyond the model's positions; the worker would refuse it too."""
    config, seq_len, objective = facts.config, facts.knobs["seq_len"], facts.spec.data["objective"]
    if objective == "image-classification" or "relative_attention_num_buckets" in config:
        # T5's positions are relative: its `n_positions` is without effect.
        return
    nested = config.get("text_config")
    if isinstance(nested, dict):
        config = {**config, **nested}
    field, positions = first_size(config, "n_positions", "max_position_embeddings")
    if positions and isinstance(seq_len, int) and (needed := positions_needed(objective, seq_len)) > positions:
        raise UserError(
            f"seq_len={seq_len} is longer than the model's model.{field}={positions}",
            key="seq_len",
            advice=f"seq_len={longest_seq_len(objective, positions)}, or model.{field}={needed}",
        )


def _vocabulary_holds_bytes(facts: Facts) -> None:
    """Refuse a family's vocabulary too small for a tokenizer trained on the text, which starts from every byte."""
    vocab, data = facts.config.get("vocab_size"), facts.spec.data
    trained = data.get("kind") not in ("random", "jpeg") and not data.get("tokenizer") and "family" in facts.spec.model
    if trained and isinstance(vocab, int) and vocab < SMALLEST_VOCAB:
        raise UserError(
            f"model.vocab_size={vocab} is too small: a byte-level BPE needs at least {SMALLEST_VOCAB}",
            key="model.vocab_size",
            allowed=[f"{SMALLEST_VOCAB} or more"],
            advice=f"model.vocab_size={SMALLEST_VOCAB}, or data.kind=random",
        )


def _heads_divide(facts: Facts) -> None:
    _, width = first_size(facts.config, "hidden_size", "n_embd")
    field, heads = first_size(facts.config, "num_attention_heads", "n_head")
    if width and heads and not facts.config.get("head_dim") and width % heads:
        divisors = [count for count in range(1, width + 1) if width % count == 0]
        raise UserError(
            f"the hidden size {width} is not divisible by model.{field}={heads}",
            key=f"model.{field}",
            advice=f"model.{field}={min(divisors, key=lambda count: abs(count - heads))}",
        )


def _family_can_be_cut(facts: Facts) -> None:
    if not facts.strategy.is_pipeline:
        return
    family, objective = facts.config.get("model_type"), facts.spec.data.get("objective")
    strategy = facts.knobs["strategy"]
    if isinstance(family, str) and family not in PIPELINE_OBJECTIVES:
        raise UserError(
            f"strategy={strategy} can cut {', '.join(PIPELINE_OBJECTIVES)} into stages, and the model is {family}",
            key="strategy",
            advice="strategy=ddp or strategy=fsdp",
        )
    if isinstance(family, str) and objective not in PIPELINE_OBJECTIVES[family]:
        raise UserError(
            f"strategy={strategy} can cut {family} into stages for data.objective="
            f"{' or '.join(PIPELINE_OBJECTIVES[family])}, not for data.objective={objective}",
            key="strategy",
            advice="strategy=ddp",
        )


def _layers_for_every_stage(facts: Facts) -> None:
    if not facts.strategy.is_pipeline:
        return
    degree = whole_number(facts.knobs, "pp_degree")
    schedule = str(facts.knobs["pp_schedule"])
    stages = degree * SCHEDULES[schedule].stages_per_rank
    field, layers = first_size(facts.config, "num_hidden_layers", "n_layer")
    if not layers or stages <= layers:
        return
    if degree <= layers:
        raise UserError(
            f"pp_schedule=interleaved with pp_degree={degree} makes {stages} stages,"
            f" more than the model's {layers} layers (model.{field})",
            key="pp_schedule",
            advice="pp_schedule=1f1b",
        )
    raise UserError(
        f"pp_degree={degree} is more than the model's {layers} layers (model.{field})",
        key="pp_degree",
        advice=f"pp_degree={layers}" if layers > 1 else "strategy=ddp",
    )


def micro_batches_divide(facts: Facts) -> None:
    """Refuse a batch that does not divide into equal micro-batches, or not into as many as the schedule takes."""
    if not facts.strategy.is_pipeline:
        return
    batch = whole_number(facts.knobs, "batch_size")
    chunks = whole_number(facts.knobs, "micro_batches")
    degree = whole_number(facts.knobs, "pp_degree")
    schedule = str(facts.knobs["pp_schedule"])
    if batch % chunks == 0 and _runs(schedule, chunks, degree):
        return
    working_counts = [count for count in range(1, batch + 1) if batch % count == 0 and _runs(schedule, count, degree)]
    nearest = min(working_counts, key=lambda count: abs(count - chunks), default=None)
    advice = f"micro_batches={nearest}" if nearest else f"batch_size={degree}, micro_batches={degree}"
    if batch % chunks:
        raise UserError(
            f"batch_size={batch} cannot be cut into micro_batches={chunks} equal parts",
            key="micro_batches",
            advice=advice,
        )
    need = f"needs at least pp_degree={degree} micro-batches, and micro_batches={chunks}"
    if schedule == "interleaved":
        rounds = max(1, chunks // degree)
        need = f"runs {rounds} equal rounds with pp_degree={degree}, and micro_batches={chunks} does not split"
    raise UserError(
        f"pp_schedule={schedule} {need}",
        key="micro_batches",
        advice=f"{advice}, or pp_schedule=gpipe",
    )


def _runs(schedule: str, chunks: int, degree: int) -> bool:
    """True if torch's schedule takes that many micro-batches.

    The rounds are `number_of_rounds` of torch's ScheduleInterleaved1F1B.
    """
    if schedule == "1f1b":
        return chunks >= degree
    return schedule == "gpipe" or chunks % max(1, chunks // degree) == 0


COMPILER_OF_DEVICE = {"cpu": ("CXX", ("g++",), "g++"), "cuda": ("CC", ("gcc", "cc", "clang"), "gcc")}
"""The variable that names the compiler, its usual names, and its Debian package, by device."""


def _compile_has_a_compiler(facts: Facts) -> None:
    compile_mode = facts.knobs["compile"]
    if compile_mode == "off":
        return
    variable, names, package = COMPILER_OF_DEVICE[facts.machine.device]
    chosen = os.environ.get(variable)
    path = search_path(facts.python)
    if any(shutil.which(name, path=path) for name in ((chosen,) if chosen else names)):
        return
    raise UserError(
        f"compile={compile_mode} needs a compiler, and PATH has no {chosen or ' or '.join(names)}; install with:"
        f" apt-get install {package}",
        key="compile",
        advice="compile=off",
    )


def flash_has_a_gpu(facts: Facts) -> None:
    """Refuse `attention=flash` on a CPU."""
    if facts.knobs["attention"] == "flash" and facts.machine.device == "cpu":
        raise UserError(
            "attention=flash is a GPU kernel and this run is on the CPU", key="attention", advice="attention=sdpa"
        )


def _flash_can_run(facts: Facts) -> None:
    precision = str(facts.knobs["precision"])
    if facts.knobs["attention"] != "flash":
        return
    if not facts.versions.get("flash-attn"):
        raise UserError(
            f"attention=flash needs flash-attn; install with: {facts.python} -m pip install flash-attn"
            " --no-build-isolation",
            key="attention",
            advice="attention=sdpa, whose own flash kernel needs no package",
        )
    if not PRECISIONS[precision].computes_in_half:
        raise UserError(
            f"attention=flash has no kernel for precision={precision}",
            key="attention",
            advice=f"attention=sdpa, or attention=flash with precision={'bf16' if precision == 'tf32' else 'fp16'}",
        )


def _model_has_the_attention(facts: Facts) -> None:
    attention = str(facts.knobs["attention"])
    if facts.attentions is not None and attention not in facts.attentions:
        kernel = "sdpa" if "sdpa" in facts.attentions else "eager"
        raise UserError(
            f"{facts.config.get('model_type', 'this model')} has no attention={attention}",
            key="attention",
            allowed=facts.attentions,
            advice=f"attention=auto, which takes {kernel}",
        )


HEAD_FIELDS = ("num_attention_heads", "n_head", "num_key_value_heads")
WIDTH_FIELDS = ("intermediate_size", "n_inner")


def _family_has_a_plan(facts: Facts) -> None:
    strategy, family = facts.strategy, facts.config.get("model_type")
    if not strategy.is_tensor_parallel or not isinstance(family, str) or family in OUR_TENSOR_PLANS:
        return
    plan: Any = facts.config.get("base_model_tp_plan")
    if not plan:
        raise UserError(
            f"strategy={strategy.name} has no plan for {family}: transformers ships none (it does for llama, mistral,"
            f" mixtral, qwen3, gemma3_text, gpt_neox), and ours are for {' and '.join(sorted(OUR_TENSOR_PLANS))}",
            key="strategy",
            advice=f"strategy={strategy.fallback}",
        )
    unknown = sorted(set(plan.values()) - TENSOR_STYLES)
    if unknown:
        raise UserError(
            f"strategy={strategy.name}: the plan of {family} cuts layers as {', '.join(unknown)},"
            " which is not done here",
            key="strategy",
            advice=f"strategy={strategy.fallback}",
        )


def _degree_divides_the_model(facts: Facts) -> None:
    if not facts.strategy.is_tensor_parallel:
        return
    degree = whole_number(facts.knobs, "tp_degree")
    for field in (*HEAD_FIELDS, *WIDTH_FIELDS):
        size = facts.config.get(field)
        if isinstance(size, int) and size % degree:
            working_degrees = [count for count in range(2, degree) if size % count == 0]
            unit = (
                "key-value heads" if "key_value" in field else "heads" if field in HEAD_FIELDS else "columns of its MLP"
            )
            raise UserError(
                f"tp_degree={degree} does not divide the model's {size} {unit} (model.{field})",
                key="tp_degree",
                advice=f"tp_degree={working_degrees[-1]}" if working_degrees else f"strategy={facts.strategy.fallback}",
            )


def _half_precision_on_a_cpu(facts: Facts) -> None:
    """Refuse fp16 with DeepSpeed on a CPU without fp16 instructions, as DeepSpeed itself does."""
    is_fp16_on_cpu = facts.knobs["precision"] == "fp16" and facts.machine.device == "cpu"
    if facts.strategy.is_zero and is_fp16_on_cpu and not cpu_has_fp16():
        raise UserError(
            f"precision=fp16 with strategy={facts.strategy.name} needs a CPU with AVX512-FP16, and this one has none",
            key="precision",
            advice="precision=bf16",
        )


def gpu_has_an_index(facts: Facts) -> None:
    """Refuse a MIG instance where DeepSpeed looks up the GPU by its index."""
    if facts.machine.device != "cuda" or not facts.strategy.needs_gpu_index:
        return
    for gpu in chosen_gpus(facts.knobs, facts.machine).gpus:
        if is_instance(gpu.uuid):
            advice = "zero3-offload" if facts.strategy.offloads else "zero3"
            raise UserError(
                f"strategy={facts.strategy.name} needs a GPU with an index, and devices={facts.knobs['devices'] or 1}"
                f" is the MIG instance {gpu.uuid} of {VISIBLE_DEVICES}",
                key="strategy",
                advice=f"strategy={advice}",
            )


def _offload_path_takes_files(facts: Facts) -> None:
    """Refuse an `offload_path` that takes no files, without ZeRO-3, or where DeepSpeed's extension cannot be built."""
    path, strategy = facts.knobs["offload_path"], facts.knobs["strategy"]
    if path is None or not facts.strategy.is_zero:
        return
    if "offload_path" not in facts.strategy.knobs:
        raise UserError(
            f"offload_path={path} does nothing with strategy={strategy}: DeepSpeed offloads to a disk in ZeRO-3 only",
            key="offload_path",
            advice=f"strategy={' or '.join(strategies_obeying('offload_path'))}, or leaving offload_path out",
        )
    folder = Path(os.path.expanduser(str(path)))
    if not folder.is_dir():
        is_file = folder.exists()
        raise UserError(
            f"offload_path={path} {'is a file' if is_file else 'does not exist'}; strategy={strategy} needs a directory"
            " to put states in",
            key="offload_path",
            advice=f"offload_path={folder.parent}" if is_file else f"mkdir -p {path}",
        )
    if (reason := _closed_to_us(folder)) is not None:
        raise UserError(
            f"offload_path={path} {reason}, and strategy={strategy} writes there",
            key="offload_path",
            advice="a directory of your own on the NVMe disk",
        )
    if (available_bytes := free_bytes(folder)) < DISK_FULL_BELOW_BYTES:
        raise UserError(
            f"offload_path={path} is full: {mebibytes(available_bytes)} free",
            key="offload_path",
            advice="a directory on a disk with free space",
        )
    missing = missing_tool(facts.python)
    if missing is None and not has_libaio(facts.python):
        missing = "libaio with its header", "apt-get install libaio-dev"
    if missing is not None:
        tool, command = missing
        raise UserError(
            f"offload_path={path} needs DeepSpeed's async_io extension, which builds with {tool}; install with:"
            f" {command}",
            key="offload_path",
            advice="leaving offload_path out: the states stay in host memory",
        )


def refuse_small_disk(knobs: KnobValues, parameters: int | None) -> None:
    """Raise UserError for an `offload_path` without space for weights and states; return when the size is unknown.

    The weights in the states' precision and the optimizer's states: with AdamW in fp32 12 bytes a parameter. A real
    run of 3,344,064 parameters wrote 14.
    """
    folder = offload_folder(knobs)
    if folder is None or parameters is None:
        return
    width = PRECISIONS[str(knobs["precision"])].weight_bytes
    needed_bytes = parameters * width * (1 + OPTIMIZERS[str(knobs["optimizer"])].state_tensors)
    available_bytes = free_bytes(folder)
    if available_bytes < needed_bytes:
        raise UserError(
            f"offload_path={knobs['offload_path']} has {mebibytes(available_bytes)} free;"
            f" the states of {parameters:,} parameters take {mebibytes(needed_bytes)}",
            key="offload_path",
            advice="a directory on a disk with free space",
        )


def _closed_to_us(folder: Path) -> str | None:
    """Reason to refuse `folder`; None for a directory that is this user's, or shared with them."""
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return "cannot be written"
    status = folder.stat()
    # Root passes `os.access` everywhere, so the owner is checked too.
    if status.st_uid != os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"belongs to {owner_of(folder)}"
    return None


RULES: tuple[Rule, ...] = (
    _warmup_leaves_steps,
    overrides_take_effect,
    devices_exist,
    strategy_uses_all_devices,
    precision_has_hardware,
    limit_for_every_rank,
    _positions_suffice,
    _vocabulary_holds_bytes,
    _heads_divide,
    gpu_has_an_index,
    strategy_has_gpus,
    optimizer_takes_the_parameters,
    optimizer_has_gpus,
    engine_runs_the_strategy,
    compile_fits,
    _engine_has_fp16_on_a_cpu,
    _packages_are_installed,
    link_has_gpus,
    _link_is_of_nccl,
    devices_fill_the_mesh,
    _family_can_be_cut,
    _layers_for_every_stage,
    micro_batches_divide,
    _family_has_a_plan,
    _degree_divides_the_model,
    _half_precision_on_a_cpu,
    _offload_path_takes_files,
    _images_are_classified,
    _model_takes_the_data,
    _texts_vary_in_length,
    _compile_has_a_compiler,
    flash_has_a_gpu,
    _flash_can_run,
    _model_has_the_attention,
)

DEVICE_RULES: tuple[Rule, ...] = (
    devices_exist,
    strategy_uses_all_devices,
    strategy_has_gpus,
    precision_has_hardware,
    gpu_has_an_index,
)
"""Rules that look at devices only, and at what they compute with."""

VALUE_RULES: tuple[Rule, ...] = (
    strategy_has_gpus,
    precision_has_hardware,
    gpu_has_an_index,
    optimizer_has_gpus,
    flash_has_a_gpu,
    link_has_gpus,
)
"""Rules by which one value cannot work on the devices asked for, whatever the other knobs are."""

KNOB_RULES: tuple[Rule, ...] = (
    overrides_take_effect,
    limit_for_every_rank,
    micro_batches_divide,
    optimizer_takes_the_parameters,
    optimizer_has_gpus,
    devices_fill_the_mesh,
    engine_runs_the_strategy,
    compile_fits,
)
"""Rules that look at knobs and the number of devices: no other model, GPU or package would help."""


def check(facts: Facts) -> None:
    """Check the settings against every rule. Raises the UserError of the first that refuses."""
    for rule in RULES:
        rule(facts)


def refusal_here(spec: RunSpec, machine: Machine) -> UserError | None:
    """The refusal of a run for which this machine lacks the devices; None when it has them."""
    return _first_refusal(DEVICE_RULES, spec, machine)


def refusal_anywhere(spec: RunSpec, machine: Machine) -> UserError | None:
    """The refusal of knobs that contradict each other; None when they do not, or this machine lacks the devices.

    A CPU is on every machine: what cannot run on it contradicts a `devices` that asks for it.
    """
    refusal = refusal_here(spec, machine)
    if refusal is not None:
        return refusal if asks_for_cpu(spec.knobs["devices"]) else None
    return _first_refusal(KNOB_RULES, spec, machine)


def refused_values(name: str, spec: RunSpec, machine: Machine) -> dict[KnobValue, str]:
    """Return the values of a knob that cannot work on the devices asked for, each with the reason."""
    values = KNOBS_BY_NAME[name].values
    reasons: dict[KnobValue, str] = {}
    for value in values.options if isinstance(values, Choice) else ():
        asked = replace(spec, knobs={**defaults(), **spec.knobs, name: value})
        for refusal in (_first_refusal((rule,), asked, machine) for rule in VALUE_RULES):
            if refusal is not None and refusal.key == name:
                reasons[value] = refusal.message
    return reasons


def _first_refusal(rules: tuple[Rule, ...], spec: RunSpec, machine: Machine) -> UserError | None:
    facts = Facts(spec, machine.used_by(spec.knobs["devices"]), config={}, versions={}, python="")
    try:
        for rule in rules:
            rule(facts)
    except UserError as refusal:
        return refusal
    return None
