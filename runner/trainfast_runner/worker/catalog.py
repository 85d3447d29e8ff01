"""Every strategy, optimizer and engine, one entry each, for both halves; a new one is an entry here and its file.

Standard library only: the parent reads this file as `trainfast_runner.worker.catalog`, the worker as
`trainfast_worker.catalog`. So entries are known by their names, and classes by their paths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .catalog_entries import (
    FLAT,
    HOST,
    SLICES,
    SWAPPED,
    EngineEntry,
    OptimizerEntry,
    ScheduleEntry,
    StrategyEntry,
)

EVERYTHING = ("weights", "gradients", "states")
TENSOR_KNOBS = ("tp_degree",)

_ZERO1 = StrategyEntry(
    name="zero1",
    path="deepspeed_zero:DeepSpeedZero",
    wrapper="DeepSpeedEngine",
    what="DeepSpeed; each rank keeps its share of the optimizer states; bf16 and fp16 keep half-precision weights"
    " and a sharded fp32 copy",
    speed="sends what ddp sends, and only slows a model that already fits",
    memory="1/N of the optimizer states",
    axes=("dp",),
    shards=("states",),
    parameter_form=FLAT,
    package="deepspeed",
    fallback="fsdp",
    memory_rule="ZeroPartitioned",
    zero_stage=1,
    batch_searchable=True,
    runs_in_trainer=True,
    accelerate_type="DEEPSPEED",
)
_ZERO2 = replace(
    _ZERO1,
    name="zero2",
    what="zero1 with its share of the gradients too",
    speed="as zero1",
    memory="1/N of the gradients and states",
    shards=("gradients", "states"),
    zero_stage=2,
)
_ZERO3 = replace(
    _ZERO1,
    name="zero3",
    what="zero2 with its share of the parameters too",
    speed="sends half as much again as ddp",
    memory="1/N of the model plus two gathered blocks",
    shards=EVERYTHING,
    parameter_form=SWAPPED,
    fallback="zero2",
    memory_rule="ZeroParameters",
    zero_stage=3,
)
_PIPELINE = StrategyEntry(
    name="pp",
    path="pipeline:PipelineParallel",
    wrapper=None,
    what="runs of layers on each device, fed micro-batch after micro-batch",
    speed="sends only activations, to its neighbours, and idles in its bubble",
    memory="1/N of the layers",
    axes=("pp",),
    knobs=("pp_degree", "pp_schedule", "micro_batches"),
    fallback="fsdp",
    memory_rule="Staged",
)
_OFFLOADED: dict[str, Any] = {"speed": "", "memory": "", "parameter_form": HOST, "fallback": "zero2", "offloads": True}
_STRATEGIES = (
    StrategyEntry(
        name="single",
        path="single:Single",
        wrapper="none",
        what="one device",
        fallback="ddp",
        memory_rule="Unshared",
        one_process=True,
        no_nccl_because="one GPU has no other to send to",
        compiles=True,
        batch_searchable=True,
        allows_warm_trials=True,
        runs_in_trainer=True,
        accelerate_type="NO",
    ),
    StrategyEntry(
        name="dp",
        path="one_process:DataParallelStrategy",
        wrapper="DataParallel",
        what="one process, a thread a GPU, the model copied every step",
        speed="slower than ddp, its first GPU does more",
        axes=("dp",),
        fallback="ddp",
        memory_rule="Copied",
        one_process=True,
        needs_gpus_because="copies the model to each of two or more GPUs from one process",
        runs_in_trainer=True,
    ),
    StrategyEntry(
        name="ddp",
        path="ddp:DistributedDataParallelStrategy",
        wrapper="DistributedDataParallel",
        what="a process a device, each with the whole model, one gradient all-reduce that overlaps with the backward",
        speed="nearly N times one device when the link keeps up",
        memory="the whole model plus reduction buckets the size of the gradients",
        axes=("dp",),
        fallback="single",
        memory_rule="Replicated",
        compiles=True,
        batch_searchable=True,
        allows_warm_trials=True,
        runs_in_trainer=True,
        accelerate_type="MULTI_GPU",
    ),
    StrategyEntry(
        name="fsdp",
        path="fsdp:ShardedDataParallel",
        wrapper="FSDPModule",
        what="weights, gradients and states cut over devices, gathered block by block",
        speed="moves 1.5x ddp's data",
        memory="1/N of the model plus one gathered block",
        axes=("dp",),
        shards=EVERYTHING,
        parameter_form=SLICES,
        knobs=("reshard",),
        fallback="ddp",
        memory_rule="FullySharded",
        batch_searchable=True,
        accelerate_type="FSDP",
    ),
    _ZERO1,
    _ZERO2,
    _ZERO3,
    replace(
        _ZERO2,
        name="zero2-offload",
        what="zero2 with the states in host memory, stepping on the CPU",
        memory_rule="ZeroOffloaded",
        **_OFFLOADED,
    ),
    replace(
        _ZERO3,
        name="zero3-offload",
        what="zero3 with parameters and states in host memory, or under offload_path on a disk, stepping on the CPU",
        knobs=("offload_path",),
        memory_rule="ZeroParametersOffloaded",
        **_OFFLOADED,
    ),
    StrategyEntry(
        name="tp",
        path="tensor_parallel:TensorParallel",
        wrapper="DTensor",
        what="each matrix cut over devices, all on the same samples",
        speed="waits for four all-reduces a layer",
        memory="1/N of the matrices",
        axes=("tp",),
        parameter_form=SLICES,
        knobs=TENSOR_KNOBS,
        fallback="fsdp",
        memory_rule="Unshared",
    ),
    _PIPELINE,
    StrategyEntry(
        name="naive-mp",
        path="one_process:SpreadLayers",
        wrapper="none",
        what="whole layers on each GPU, one at a time",
        speed="one GPU works at a time",
        memory="1/N of the layers",
        axes=("mp",),
        fallback="pp",
        memory_rule="Staged",
        one_process=True,
        needs_gpus_because="puts layers on each of two or more GPUs from one process",
        no_nccl_because="one process copies its activations between GPUs itself",
    ),
    StrategyEntry(
        name="ddp+tp",
        path="tensor_parallel:DataTensorParallel",
        wrapper="DTensor+DistributedDataParallel",
        what="groups of tp inside ddp",
        axes=("dp", "tp"),
        parameter_form=SLICES,
        knobs=TENSOR_KNOBS,
        fallback="ddp",
        memory_rule="Replicated",
    ),
    StrategyEntry(
        name="fsdp+tp",
        path="tensor_parallel:ShardedTensorParallel",
        wrapper="DTensor+FSDPModule",
        what="groups of tp inside fsdp",
        axes=("dp", "tp"),
        shards=EVERYTHING,
        parameter_form=SLICES,
        knobs=(*TENSOR_KNOBS, "reshard"),
        fallback="fsdp",
        memory_rule="FullySharded",
    ),
    replace(
        _PIPELINE, name="ddp+pp", what="pipelines side by side", speed="", memory="", axes=("dp", "pp"), fallback="ddp"
    ),
)

_ADAMW = OptimizerEntry(
    name="adamw",
    path="torch.optim:AdamW",
    class_name="AdamW",
    what="torch's own choice among the next three",
    speed="foreach on a GPU, also on the slices of fsdp and tp, and loop on a CPU",
    memory="8 bytes of states a parameter",
    trainer_name="adamw_torch",
)
_EIGHT_BIT = OptimizerEntry(
    name="adamw-8bit",
    path="bitsandbytes.optim:AdamW8bit",
    class_name="AdamW8bit",
    what="AdamW with quantized states",
    speed="as fast as AdamW",
    memory="2 bytes of states a parameter",
    eight_bit=True,
    refuses=(
        (SLICES, "quantizes plain tensors"),
        (SWAPPED, "keeps its quantized states per parameter"),
        (HOST, "quantizes states on the GPU"),
    ),
    package="bitsandbytes",
    trainer_name="adamw_bnb_8bit",
)
_FACTORS = "factors whole matrices"
_OPTIMIZERS = (
    _ADAMW,
    replace(
        _ADAMW,
        name="adamw-loop",
        arguments=(("foreach", False), ("fused", False)),
        implementation="loop",
        what="AdamW, one parameter after the other",
        speed="slower than foreach",
        memory="",
        trainer_name=None,
    ),
    replace(
        _ADAMW,
        name="adamw-foreach",
        arguments=(("foreach", True),),
        implementation="foreach",
        what="AdamW, all parameters at a time",
        speed="slower than fused",
        memory="4 bytes a parameter more at its peak",
        trainer_name=None,
    ),
    replace(
        _ADAMW,
        name="adamw-fused",
        arguments=(("fused", True),),
        implementation="fused",
        what="AdamW in one kernel",
        speed="the fastest AdamW",
        memory="nothing beyond the states",
        trainer_name="adamw_torch_fused",
    ),
    _EIGHT_BIT,
    replace(
        _EIGHT_BIT,
        name="paged-adamw-8bit",
        path="bitsandbytes.optim:PagedAdamW8bit",
        class_name="PagedAdamW8bit",
        what="adamw-8bit with states that are paged out to the host when a GPU is full",
        speed="",
        needs_gpus_because="pages its states between a GPU and the host",
        fallback="adamw-8bit",
        trainer_name="paged_adamw_8bit",
    ),
    OptimizerEntry(
        name="adafactor",
        path="transformers.optimization:Adafactor",
        # As the Trainer builds it: the given rate is used as it is.
        arguments=(("scale_parameter", False), ("relative_step", False)),
        class_name="Adafactor",
        what="factored states; converges slower",
        speed="the slowest",
        memory="about no states",
        state_tensors=0,
        refuses=((SLICES, "reads whole matrices"), (FLAT, _FACTORS), (SWAPPED, _FACTORS), (HOST, _FACTORS)),
        trainer_name="adafactor",
    ),
    OptimizerEntry(
        name="sgd",
        path="torch.optim:SGD",
        class_name="SGD",
        what="no momentum",
        memory="no states",
        state_tensors=0,
        trainer_name="sgd",
    ),
)

_ACCELERATE = EngineEntry(
    name="accelerate",
    path="accelerate_loop:AccelerateLoop",
    what="the short Accelerate loop, on the same samples and loss",
    # Asked for FSDP on a CPU, both other engines silently train DDP.
    strategies=("single", "ddp"),
    compiles=False,
    fp16_on_cpu=False,
    package="accelerate",
)
_ENGINES = (
    EngineEntry(name="native", path="native:Native", what="the loop here", allows_warm_trials=True),
    _ACCELERATE,
    replace(
        _ACCELERATE,
        name="trainer",
        path="hf_trainer:HfTrainer",
        what="the Hugging Face Trainer, on the same samples and loss",
        speed="does a little more around each step",
    ),
)

_SCHEDULES = (
    ScheduleEntry(name="gpipe", wrapper="ScheduleGPipe"),
    ScheduleEntry(name="1f1b", wrapper="Schedule1F1B"),
    ScheduleEntry(name="interleaved", wrapper="ScheduleInterleaved1F1B", stages_per_rank=2),
)

DATA_KINDS = ("text", "files", "hub", "random", "jpeg")
TRAINING_OBJECTIVES = ("causal-lm", "masked-lm", "sequence-classification", "seq2seq", "image-classification")
DATA_SAMPLES = ("packed", "documents", "lines")

STRATEGIES = {entry.name: entry for entry in _STRATEGIES}
OPTIMIZERS = {entry.name: entry for entry in _OPTIMIZERS}
ENGINES = {entry.name: entry for entry in _ENGINES}
SCHEDULES = {entry.name: entry for entry in _SCHEDULES}


def packages() -> tuple[str, ...]:
    """Packages that some entry needs."""
    entries = (*_STRATEGIES, *_OPTIMIZERS, *_ENGINES)
    return tuple(dict.fromkeys(entry.package for entry in entries if entry.package is not None))


def nearest_strategy(entry: StrategyEntry, works: Callable[[StrategyEntry], bool]) -> str:
    """Name of the nearest strategy that asks for less and `works`; single if there is none."""
    for _ in STRATEGIES:
        entry = STRATEGIES[entry.fallback]
        if works(entry):
            return entry.name
    return "single"


def nearest_optimizer(entry: OptimizerEntry, strategy: StrategyEntry) -> str:
    """Name of the nearest optimizer that works with a strategy."""
    while entry.refusal(strategy):
        entry = OPTIMIZERS[entry.fallback]
    return entry.name


def strategies_obeying(knob: str) -> tuple[str, ...]:
    """Names of the strategies that obey a knob of `StrategyEntry.knobs`."""
    return tuple(name for name, entry in STRATEGIES.items() if knob in entry.knobs)


def allows_warm_trials(strategy: str, engine: str, compile: str) -> bool:
    """True if one process can train one setting after another with these.

    Every compiled setting is another program, which warms nothing for the next.
    """
    return STRATEGIES[strategy].allows_warm_trials and ENGINES[engine].allows_warm_trials and compile == "off"
