"""The knob table: every setting of a run, declared once.

The command line's `--set`, the panel on the screen, the checks of presets, the help and the exporters are all
derived from `KNOBS`. A new knob is one entry here and the worker's handling of it. A new strategy, optimizer, engine or
lever is an entry in the worker's `catalog`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from trainfast_runner.errors import UserError, nearest
from trainfast_runner.settings.knob_values import (
    BytesPerRank,
    Choice,
    DeviceSelection,
    Equivalent,
    FreeText,
    Knob,
    KnobValue,
    KnobValues,
    Real,
    Whole,
    whole_number,
)
from trainfast_runner.settings.precisions import PRECISIONS
from trainfast_runner.worker import catalog
from trainfast_runner.worker.catalog import (
    ENGINES,
    LEVERS,
    OPTIMIZERS,
    SCHEDULES,
    STRATEGIES,
    WITH_ADAPTERS,
    LeverEntry,
    OptimizerEntry,
    strategies_obeying,
)

POWERS_OF_TWO = tuple(2**power for power in range(14))
ON_OFF = ("on", "off")
ADAMW_KERNELS = (
    *(name for name, entry in OPTIMIZERS.items() if entry.path == OPTIMIZERS["adamw"].path),
    "adamw-offload",
)
"""The optimizers that are torch's AdamW and differ only in how and where it is computed."""


def _joined_help(begin: str, entries: Mapping[str, object], field: str) -> str:
    """The help of a knob: the help of each of the catalog's entries after its name."""
    texts = [f"{name}: {text}." for name, entry in entries.items() if (text := getattr(entry, field))]
    return " ".join([begin, *texts]).strip()


def _lever_knob(entry: LeverEntry) -> Knob:
    """The knob of a lever, in the words of its entry."""
    values = {value.name: value for value in entry.values}
    alike = tuple(name for name, value in values.items() if value.tolerance is not None)
    tried = tuple(name for name, value in values.items() if value.is_searched and name != entry.plain)
    return Knob(
        entry.name,
        Choice(tuple(values)),
        default=entry.plain,
        group=entry.group,
        what=_joined_help(entry.what, values, "what"),
        speed=". ".join(value.speed for value in entry.values if value.speed) or "none",
        memory=". ".join(value.memory for value in entry.values if value.memory) or "none",
        same_as=Equivalent(*entry.same_as),
        equivalent_values="all" if len(alike) == len(values) else alike,
        changes_in_warm_process=entry.changes_in_warm_process,
        needs_new_process_for=tuple(name for name, value in values.items() if value.needs_process),
        search_values=(entry.plain, *tried) if tried else (),
        min_gpus=int(all(value.needs_gpus_reason for value in entry.values[1:])),
    )


KNOBS: tuple[Knob, ...] = (
    Knob(
        "precision",
        Choice(tuple(PRECISIONS)),
        default="fp32",
        group="compute",
        what="Number format of the matrix products. Weights stay fp32 except in bf16-pure. A cast weight is cached"
        " within one autocast region, so it is cast once a micro-batch. fp16 overflows above 65504 and needs"
        " loss scaling; bf16 does not. fp8 is bf16 with the blocks' matrix products in float8, by torchao (Ada, Hopper"
        " and later).",
        speed="tf32 up to 3x over fp32 (Ampere and later), fp16 and bf16 about 2x and up to 5x on tensor cores; fp8 is"
        " faster where products are large, and slower for small models: its casts cost more than they save",
        memory="activations about half in fp16 and bf16; weights exist twice, so small batches may use more;"
        " bf16-pure halves weights, gradients and optimizer states too; fp8 saves none over bf16",
        same_as=Equivalent("fp16 / bf16 / tf32", "mixed_precision", "fp16.enabled / bf16.enabled", ""),
        equivalent_values=("fp32", "tf32", "fp16", "bf16"),
        changes_in_warm_process=True,
        needs_new_process_for=("fp16", "bf16-pure", "fp8"),
        search_values=("fp32", "tf32", "bf16", "fp16"),
    ),
    Knob(
        "batch_size",
        Whole(1, 1_048_576, POWERS_OF_TWO),
        default=8,
        group="batch",
        what="Samples of one micro-batch on one data-parallel rank. Multiples of 8 suit fp16 tensor cores, of 64 an"
        " A100. A larger batch is not always better for quality.",
        speed="larger batches fill the device until it is full, then throughput stays flat",
        memory="activations grow in proportion",
        same_as=Equivalent("per_device_train_batch_size", "DataLoader(batch_size)", "train_micro_batch_size_per_gpu"),
        changes_in_warm_process=True,
        search_values=POWERS_OF_TWO,
    ),
    Knob(
        "grad_accum",
        Whole(1, 65_536, POWERS_OF_TWO[:11]),
        default=1,
        group="batch",
        what="Micro-batches added up before one optimizer step. Not worth it when the batch already fits. Changes the"
        " global batch, so learning rate and number of steps change with it.",
        speed="20-30 % faster than stepping at each micro-batch; slower than the same batch in one piece",
        memory="a large global batch at the memory of one micro-batch; gradients stay between micro-batches",
        same_as=Equivalent("gradient_accumulation_steps", "gradient_accumulation_steps", "gradient_accumulation_steps"),
        changes_in_warm_process=True,
        search_values=POWERS_OF_TWO,
    ),
    Knob(
        "seq_len",
        Whole(8, 1_048_576, tuple(2**power for power in range(5, 16))),
        default=256,
        group="batch",
        what="Tokens a sample. Multiples of 8, better 64, suit tensor cores.",
        speed="attention costs grow with the square, everything else in proportion",
        memory="activations grow in proportion (with the square for eager attention)",
        same_as=Equivalent("max_seq_length (of the data)", "", ""),
        equivalent_values=(),
    ),
    *map(_lever_knob, LEVERS.values()),
    Knob(
        "optimizer",
        Choice(tuple(OPTIMIZERS)),
        default="adamw",
        group="compute",
        what=_joined_help("Optimizer that updates the weights.", OPTIMIZERS, "what"),
        speed=_joined_help("", OPTIMIZERS, "speed"),
        memory=_joined_help("", OPTIMIZERS, "memory"),
        same_as=Equivalent("optim", "torch.optim / bitsandbytes / torchao", "optimizer.type"),
        equivalent_values=ADAMW_KERNELS,
        changes_in_warm_process=True,
        search_values=("adamw", "adamw-foreach", "adamw-fused", "adamw-offload"),
    ),
    Knob(
        "lora_rank",
        Whole(1, 4096, (4, 8, 16, 32, 64, 128)),
        default=16,
        group="compute",
        what="Columns of one trained matrix of an adapter, and rows of the other.",
        speed="the adapters' own products grow in proportion: little up to 64",
        memory="the adapters, their gradients and states grow in proportion",
        same_as=Equivalent("r (of LoraConfig)", "r (of LoraConfig)", ""),
        equivalent_values=(),
        only_with=WITH_ADAPTERS,
        obeyed_by="method",
    ),
    Knob(
        "lora_targets",
        FreeText("attention, all, or names of layers joined by + such as q_proj+v_proj", ("attention", "all")),
        default="attention",
        group="compute",
        what="Layers that get an adapter. attention: every linear layer of the attentions. all: every linear layer of"
        " the blocks. Or names of layers joined by +.",
        speed="all has about twice the calls of attention",
        memory="more layers, more adapters; a targeted layer's input stays until its backward",
        same_as=Equivalent("target_modules (of LoraConfig)", "target_modules (of LoraConfig)", ""),
        equivalent_values=(),
        only_with=WITH_ADAPTERS,
        obeyed_by="method",
    ),
    Knob(
        "samples",
        Choice(("packed", "padded", "grouped")),
        default="packed",
        group="data",
        what="How texts become samples. packed: cut end to end, so that every sample is full. padded: each text"
        " (data.texts: a document or a line) is a sample, and a batch is padded to its longest. grouped: padded, with"
        " texts of about one length in a batch, sorted within 50 steps. Padding is not counted as tokens.",
        speed="grouped computes less padding than padded, the less the more texts a batch has; packed computes none",
        memory="padded and grouped peak in their first two steps, which take the longest texts",
        same_as=Equivalent("train_sampling_strategy"),
        equivalent_values=(),
        changes_in_warm_process=True,
        needs_new_process_for=("packed",),
    ),
    Knob(
        "workers",
        Whole(0, 256, (0, 1, 2, 4, 8, 16, 32)),
        default=0,
        group="data",
        what="Processes that load data beside the training. 0 loads in the training process itself.",
        speed="hides loading behind compute; more than the data needs does not help",
        memory="each keeps prefetch batches in host memory",
        same_as=Equivalent("dataloader_num_workers", "DataLoader(num_workers)", ""),
        changes_in_warm_process=True,
        search_values=(0, 2, 8),
    ),
    Knob(
        "pin_memory",
        Choice(ON_OFF),
        default="off",
        group="data",
        what="Page-locked host memory for batches, so that copies to the GPU overlap with compute.",
        speed="faster copies to the GPU; nothing on a CPU",
        memory="the batches in flight, in host memory",
        same_as=Equivalent("dataloader_pin_memory", "DataLoader(pin_memory)", ""),
        min_gpus=1,
        search_values=ON_OFF,
    ),
    Knob(
        "prefetch",
        Whole(1, 256, (1, 2, 4, 8, 16)),
        default=2,
        group="data",
        what="Batches each loader process prepares ahead. Without loader processes it has no effect.",
        speed="smooths uneven loading times",
        memory="workers x prefetch batches in host memory",
        same_as=Equivalent("dataloader_prefetch_factor", "DataLoader(prefetch_factor)", ""),
        changes_in_warm_process=True,
    ),
    Knob(
        "strategy",
        Choice(tuple(STRATEGIES)),
        default="single",
        group="parallel",
        what=_joined_help("How the model spreads over devices.", STRATEGIES, "what"),
        speed=_joined_help("", STRATEGIES, "speed"),
        memory=_joined_help("On each of N devices.", STRATEGIES, "memory"),
        same_as=Equivalent("(launcher)", "distributed_type", "zero_optimization.stage", "--nproc-per-node"),
        search_values=("single", "ddp", "fsdp", "zero2"),
    ),
    Knob(
        "tp_degree",
        Whole(2, 64, (2, 4, 8)),
        default=2,
        group="parallel",
        what="Devices that share each layer's matrices in tensor parallelism; must divide the attention heads, the"
        " key-value heads and the MLP's width. With ddp+tp and fsdp+tp devices / tp_degree groups share the global"
        " batch; with ddp+tp+pp and fsdp+tp+pp each pipeline has tp_degree x pp_degree devices.",
        speed="two all-reduces of the activations a layer forward and two backward: only inside one machine with fast"
        " links",
        memory="weights, gradients and states divided by the degree, the vocabulary where it divides; norms whole on"
        " each",
        only_with=strategies_obeying("tp_degree"),
    ),
    Knob(
        "sequence_parallel",
        Choice(ON_OFF),
        default="off",
        group="parallel",
        what="on: the devices of one tp group also share each sequence between the cut matrices, in norms and residuals"
        " (Korthikanti et al. 2022); tp_degree must divide seq_len.",
        speed="sends as much: an all-gather and a reduce-scatter where tp has an all-reduce",
        memory="activations outside of attentions and MLPs divided by tp_degree; with checkpointing=full nearly all",
        only_with=strategies_obeying("sequence_parallel"),
    ),
    Knob(
        "ep_degree",
        Whole(1, 64, (1, 2, 4, 8)),
        default=1,
        group="parallel",
        what="Devices over which a mixture's experts are spread, each expert whole on one of them, by transformers' own"
        " expert parallelism. 1: tp cuts the matrices of each expert; else tp_degree, which must divide the experts.",
        speed="whole matrices, and with k experts a token less to send than tp from a degree of more than 2 k on; the"
        " device with the most tokens holds up the others, and each layer waits for the host",
        memory="the same weights, gradients and states as with tp; a device has the activations of the tokens routed to"
        " its experts, more where routing is uneven",
        only_with=strategies_obeying("ep_degree"),
    ),
    Knob(
        "pp_degree",
        Whole(2, 64, (2, 4, 8)),
        default=2,
        group="parallel",
        what="Devices in one pipeline: the layers are cut into as many stages of about equal FLOPs (twice as many with"
        " pp_schedule=interleaved). With ddp+pp devices / pp_degree pipelines run side by side; a stage of"
        " ddp+tp+pp and fsdp+tp+pp is tp_degree devices.",
        speed="a device idles while the pipeline fills and drains: a share of (p - 1) / (m + p - 1) of the step with p"
        " devices and m micro_batches",
        memory="weights, gradients and states divided by the degree; the first stage has the embedding, the last the"
        " head",
        only_with=strategies_obeying("pp_degree"),
    ),
    Knob(
        "pp_schedule",
        Choice(tuple(SCHEDULES)),
        default="gpipe",
        group="parallel",
        what="Order in which pipeline stages do forwards and backwards. gpipe: all forwards, then all backwards. 1f1b:"
        " one forward, one backward in turn. interleaved: 1f1b with two stages a device.",
        speed="gpipe and 1f1b have the same bubble, interleaved half of it for twice the messages",
        memory="gpipe keeps the activations of all micro_batches, 1f1b at most those of pp_degree",
        only_with=strategies_obeying("pp_schedule"),
    ),
    Knob(
        "micro_batches",
        Whole(1, 1024, POWERS_OF_TWO[:8]),
        default=4,
        group="parallel",
        what="Chunks a batch is cut into in pipeline parallelism; must divide batch_size. 1 is naive model parallelism;"
        " 1f1b needs at least pp_degree.",
        speed="more chunks shrink the bubble until each is too small to fill the device",
        memory="gpipe keeps the activations of all of them",
        only_with=strategies_obeying("micro_batches"),
    ),
    Knob(
        "reshard",
        Choice(ON_OFF),
        default="on",
        group="parallel",
        what="on: FSDP frees a block's gathered weights after its forward, and gathers them again for its backward.",
        speed="off saves one all-gather a block: two thirds of on's traffic",
        memory="off keeps the whole model's weights from the forward to the backward",
        only_with=strategies_obeying("reshard"),
    ),
    Knob(
        "offload_path",
        FreeText(),
        default=None,
        group="parallel",
        what="Directory on an NVMe disk for the offloaded parameters and states of zero3-offload. Needs libaio and a"
        " C++ compiler.",
        speed="bound by the disk",
        memory="states leave host memory too",
        same_as=Equivalent(deepspeed="zero_optimization.offload_optimizer.nvme_path"),
        only_with=strategies_obeying("offload_path"),
    ),
    Knob(
        "devices",
        DeviceSelection(),
        default=None,
        group="parallel",
        what="A count (2) or indexes (0+1) into what CUDA_VISIBLE_DEVICES leaves; cpu, or cpu:N for N processes,"
        " trains on the CPU even where there is a GPU. auto: the GPU with most free memory for single, all of them"
        " otherwise. A count prefers GPUs joined by NVLink to those with up to 10 % more free memory; without a"
        " GPU a count is a number of processes, up to 8.",
        speed="",
        memory="",
        same_as=Equivalent("CUDA_VISIBLE_DEVICES", "--gpu_ids", "--include", "--nproc-per-node"),
    ),
    Knob(
        "p2p",
        Choice(ON_OFF),
        default="on",
        group="parallel",
        what="off sets NCCL_P2P_DISABLE=1: devices talk through host memory, as on a machine without NVLink.",
        speed="off shows what the link is worth",
        same_as=Equivalent("NCCL_P2P_DISABLE", "NCCL_P2P_DISABLE", "NCCL_P2P_DISABLE", "NCCL_P2P_DISABLE"),
        min_gpus=2,
    ),
    Knob(
        "memory_limit",
        BytesPerRank(("512MiB", "1GiB", "2GiB", "4GiB", "8GiB", "16GiB", "24GiB", "40GiB")),
        default=None,
        group="memory",
        what="A real limit on what each rank allocates after its imports: RLIMIT_DATA on a CPU, a cap on the caching"
        " allocator on a GPU. Memory that the libraries or the CUDA context took before does not count.",
        speed="on a CPU up to half: memory is measured in every step; on a GPU none until the limit is near, where the"
        " allocator retries",
        memory="what does not fit ends as out of memory",
    ),
    Knob(
        "engine",
        Choice(tuple(ENGINES)),
        default="native",
        group="compute",
        what=_joined_help("Library that runs the training loop.", ENGINES, "what"),
        speed=_joined_help("", ENGINES, "speed"),
    ),
    Knob(
        "lr",
        Real(0.0, 10.0, (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3)),
        default=3e-4,
        group="optimization",
        what="Learning rate. With a global batch k times as large, the linear rule makes it k times as large.",
        same_as=Equivalent("learning_rate", "optimizer(lr)", "optimizer.params.lr"),
        equivalent_values=(),
    ),
    Knob(
        "lr_schedule",
        Choice(("constant", "linear")),
        default="constant",
        group="optimization",
        what="linear lets the rate fall to zero over the steps of the run.",
        same_as=Equivalent("lr_scheduler_type", "get_scheduler", "scheduler.type"),
        equivalent_values=(),
    ),
    Knob(
        "weight_decay",
        Real(0.0, 1.0, (0.0, 0.01, 0.1)),
        default=0.0,
        group="optimization",
        what="Decoupled decay of weight matrices; biases and norms are left out.",
        same_as=Equivalent("weight_decay", "optimizer(weight_decay)", "optimizer.params.weight_decay"),
        equivalent_values=(),
    ),
    Knob(
        "grad_clip",
        Real(0.0, 1e6, (0.0, 0.5, 1.0)),
        default=0.0,
        group="optimization",
        what="Largest gradient norm; 0 is off.",
        speed="one pass over the gradients",
        same_as=Equivalent("max_grad_norm", "clip_grad_norm_", "gradient_clipping"),
        equivalent_values=(),
    ),
    Knob(
        "seed",
        Whole(0, 2**31 - 1, (0, 1, 42)),
        default=42,
        group="optimization",
        what="Seed of the weights, the order of samples and the masks.",
        same_as=Equivalent("seed", "set_seed", ""),
        equivalent_values=(),
    ),
    Knob(
        "steps",
        Whole(1, 10_000_000, (10, 20, 30, 50, 100, 200, 500, 1000)),
        default=50,
        group="run",
        what="Optimizer steps in total, the timing warm-up among them.",
        same_as=Equivalent("max_steps", "", ""),
        equivalent_values=(),
    ),
    Knob(
        "timing_warmup",
        Whole(0, 100_000, (0, 1, 3, 5, 10)),
        default=3,
        group="run",
        what="First steps that are recorded but enter no figure: kernels are chosen and caches filled in them.",
    ),
    Knob(
        "watch",
        DeviceSelection(always_list=True),
        default=None,
        group="run",
        what="NVML devices whose readings are joined to the run; auto: those its ranks use, none for a CPU run.",
        min_gpus=1,
    ),
)

KNOBS_BY_NAME: Mapping[str, Knob] = {knob.name: knob for knob in KNOBS}


def knob(name: str) -> Knob:
    """The entry of that name. Raises UserError with the nearest name."""
    if name not in KNOBS_BY_NAME:
        similar = nearest(name, KNOBS_BY_NAME)
        allowed = None if similar else KNOBS_BY_NAME
        raise UserError(f"there is no knob {name!r}", key=name, allowed=allowed, nearest=similar)
    return KNOBS_BY_NAME[name]


def defaults() -> KnobValues:
    """Every knob at its default."""
    return {entry.name: entry.default for entry in KNOBS}


def not_at_default(knobs: KnobValues) -> KnobValues:
    """The knobs whose value is not their default."""
    default_values = defaults()
    return {name: value for name, value in knobs.items() if value != default_values[name]}


def trainer_fields(knobs: KnobValues) -> dict[str, object]:
    """The fields that these knobs decide, by name."""
    fields: dict[str, object] = {}
    for entry in KNOBS:
        if entry.name not in knobs:
            continue
        names, value = entry.same_as.trainer_fields, knobs[entry.name]
        if entry.name in LEVERS:
            fields |= dict(LEVERS[entry.name][value].trainer_fields or ())
        elif entry.name == "precision":
            fields |= {name: value == name for name in ("bf16", "fp16", "tf32")}
        elif entry.name == "samples":
            # The Trainer does not pack: its data does.
            fields |= {} if value == "packed" else {names[0]: "group_by_length" if value == "grouped" else "random"}
        elif len(names) != 1 or (entry.name == "prefetch" and not knobs.get("workers")):
            continue
        elif entry.name == "optimizer":
            fields |= _trainer_optimizer(names[0], OPTIMIZERS[str(value)])
        else:
            # Switches are booleans there.
            switches = {"on": True, "off": False}
            fields[names[0]] = switches.get(value, value) if isinstance(value, str) else value
    if "torch_compile_mode" in fields:
        fields["torch_compile_mode"] = compile_mode(knobs)
    if "use_liger_kernel" in fields:
        parts = dict.fromkeys(("rope", "rms_norm", "layer_norm", "swiglu", "geglu"), knobs.get("kernels") == "liger")
        fused = {"cross_entropy": False, "fused_linear_cross_entropy": knobs.get("loss") == "liger"}
        fields["liger_kernel_config"] = {**parts, **fused}
    return fields


def loader_arguments(knobs: KnobValues) -> dict[str, object]:
    """The arguments of DataLoader that these knobs decide, by name."""
    names = {"batch_size": "batch_size", "num_workers": "workers", "prefetch_factor": "prefetch"}
    arguments: dict[str, object] = {argument: knobs[name] for argument, name in names.items() if name in knobs}
    if "pin_memory" in knobs:
        arguments["pin_memory"] = knobs["pin_memory"] == "on"
    if knobs.get("workers") == 0:
        # DataLoader refuses one without workers.
        arguments["prefetch_factor"] = None
    return arguments


def compile_mode(knobs: KnobValues) -> str:
    """torch.compile's mode with these knobs."""
    return catalog.compile_mode(str(knobs["compile"]), whole_number({"grad_accum": 1, **knobs}, "grad_accum"))


def _trainer_optimizer(field: str, optimizer: OptimizerEntry) -> dict[str, object]:
    """The Trainer's name of an optimizer, else of another loop of the same class, else nothing."""
    trainer_names = (
        entry.trainer_name for entry in OPTIMIZERS.values() if entry.path == optimizer.path and entry.trainer_name
    )
    name = optimizer.trainer_name or next(trainer_names, None)
    return {} if name is None else {field: name}


def split_setting(text: str, option: str, form: str) -> tuple[str, str]:
    """Return the name and the value of a setting of this `option`, which takes this `form`. Raises UserError."""
    name, equals, value = text.partition("=")
    name = name.strip()
    if not equals or not name:
        raise UserError(f"{option} takes {form}, not {text!r}", key=name or text)
    return name, value


def setting_of(setting: str) -> tuple[str, KnobValue]:
    """Return the knob and the value of `KNOB=VALUE`. Raises UserError."""
    name, value = split_setting(setting, "--set", "knob=value")
    return name, knob(name).read(value.strip())


def settings_of(knobs: Mapping[str, KnobValue], overrides: Iterable[str]) -> list[str]:
    """The overrides of a script's knobs, as they are typed after `--set`."""
    return [f"{name}={knob(name).text_of(knobs[name])}" for name in overrides]


Vary = Mapping[str, Sequence[KnobValue]]
"""The values of each varied knob, each once."""


def read_vary(texts: Iterable[str]) -> dict[str, list[KnobValue]]:
    """Return the values of each `knob=a,b,c`, read by its knob. Raises UserError, also for a knob given twice."""
    varied: dict[str, list[KnobValue]] = {}
    for text in texts:
        name, values = split_setting(text, "--vary", "knob=a,b,c")
        entry = knob(name)
        if name in varied:
            every_value = ",".join([*map(entry.text_of, varied[name]), values])
            raise UserError(f"--vary {name} is given twice", key=name, advice=f"--vary {name}={every_value}")
        if not values.strip(" ,"):
            raise UserError(f"--vary {text}: no value", key=name, allowed=[entry.values.describe()])
        varied[name] = list(dict.fromkeys(entry.read(value.strip()) for value in values.split(",")))
    return varied


def combinations_of(vary: Vary) -> Iterator[dict[str, KnobValue]]:
    """Yield every combination of the varied values."""
    for values in itertools.product(*vary.values()):
        yield dict(zip(vary, values, strict=True))


def fewest_to_drop(vary: Vary, count: int, max_count: int) -> tuple[list[str], int]:
    """Return the fewest knobs without which `count` combinations become at most `max_count`, and how many are left."""
    combinations, dropped_knobs = count, []
    for name, values in sorted(vary.items(), key=lambda item: -len(item[1])):
        if combinations <= max_count:
            break
        combinations = math.ceil(combinations / len(values))
        dropped_knobs.append(name)
    return dropped_knobs, combinations
