"""The strategies, one entry each, pipelines' schedules, and the families that can be cut. Standard library only."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

WHOLE, SLICES, FLAT, SWAPPED, HOST = "whole", "slices", "flat", "swapped", "host"
"""Ways in which an optimizer is given parameters; see `PARAMETER_FORMS`."""
PARAMETER_FORMS = {
    WHOLE: "it is given whole parameters",
    SLICES: "a rank has slices (DTensors)",
    FLAT: "it is given flat slices",
    SWAPPED: "it is given flat slices, others at every step",
    HOST: "it is given flat slices on the CPU",
}
"""The words of a refusal for each form: fsdp and tp give slices, zero1 and zero2 flat ones, zero3 swaps them."""


@dataclass(frozen=True, kw_only=True)
class StrategyEntry:
    """A way to spread a model and its batches over devices; `what`, `speed` and `memory` are its help."""

    name: str
    path: str
    """`module:Class` below worker/strategies."""
    wrapper: str | None
    """Classes of the live wrappers, joined by + in alphabetical order, without a pipeline's schedule; None if that is
    the only one."""
    what: str
    speed: str = ""
    memory: str = ""
    axes: tuple[str, ...] = ()
    """Axes of the device mesh: tp and pp, of `tp_degree` and `pp_degree` devices, dp (the rest), and mp, of all devices
    of one process."""
    shards: tuple[str, ...] = ()
    """Parts of the state that the dp axis shards: weights, gradients, states."""
    parameter_form: str = WHOLE
    """Form of the parameters that the optimizer gets."""
    memory_rule: str | None = None
    """A class of memory/sharding.py, or Staged for memory/pipeline.py; None where memory is not predicted."""
    knobs: tuple[str, ...] = ()
    """Knobs that mean something only with strategies that name them."""
    package: str | None = None
    """The package that has to be installed."""
    fallback: str
    """The nearest strategy that asks for less."""
    one_process: bool = False
    """True if all devices belong to one process."""
    needs_gpus_reason: str | None = None
    """Use of the GPUs, for a strategy that cannot run on the CPU."""
    no_nccl_reason: str | None = None
    """The reason NCCL is never called."""
    zero_stage: int | None = None
    offloads: bool = False
    """True if optimizer states leave the device."""
    compiles: bool = False
    """True if torch.compile works with the strategy."""
    batch_searchable: bool = False
    """True if a batch search can give its ranks another batch size while they run."""
    allows_warm_trials: bool = False
    """True if one process can train one setting after another with the strategy."""
    runs_in_trainer: bool = False
    """True if transformers' Trainer can be told to do the same."""
    accelerate_type: str | None = None
    """Accelerate's distributed_type; None if Accelerate has none for the strategy."""

    @property
    def one_device(self) -> bool:
        """True if the strategy uses one device only."""
        return self.one_process and not self.axes

    @property
    def model_axes(self) -> tuple[str, ...]:
        """The axes that cut the model, in the order of the mesh; the degree of each is a knob."""
        return tuple(axis for axis in ("pp", "tp") if axis in self.axes)

    @property
    def is_tensor_parallel(self) -> bool:
        """True if the strategy cuts each matrix."""
        return "tp" in self.axes

    @property
    def is_pipeline(self) -> bool:
        """True if each rank has a stage of a pipeline."""
        return "pp" in self.axes

    @property
    def is_zero(self) -> bool:
        """True if DeepSpeed runs the strategy."""
        return self.zero_stage is not None


@dataclass(frozen=True, kw_only=True)
class ScheduleEntry:
    """The order in which a pipeline's stages do their forwards and backwards."""

    name: str
    wrapper: str
    """Name of torch's class."""
    stages_per_rank: int = 1


ALL_STATE_PARTS = ("weights", "gradients", "states")
"""The parts of a training's state that a strategy can shard."""
TENSOR_KNOBS = ("tp_degree", "sequence_parallel", "ep_degree")
"""The knobs of a strategy with tensor parallelism."""
PIPELINE_KNOBS = ("pp_degree", "pp_schedule", "micro_batches")
"""The knobs of a strategy with a pipeline."""

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
    shards=ALL_STATE_PARTS,
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
    knobs=PIPELINE_KNOBS,
    fallback="fsdp",
    memory_rule="Staged",
)
_ZERO2_OFFLOAD = replace(
    _ZERO2,
    name="zero2-offload",
    what="zero2 with the states in host memory, stepping on the CPU",
    speed="",
    memory="",
    parameter_form=HOST,
    fallback="zero2",
    memory_rule="ZeroOffloaded",
    offloads=True,
)
_ZERO3_OFFLOAD = replace(
    _ZERO2_OFFLOAD,
    name="zero3-offload",
    what="zero3 with parameters and states in host memory, or under offload_path on a disk, stepping on the CPU",
    shards=ALL_STATE_PARTS,
    knobs=("offload_path",),
    memory_rule="ZeroParametersOffloaded",
    zero_stage=3,
)
_STRATEGIES = (
    StrategyEntry(
        name="single",
        path="base:Strategy",
        wrapper="none",
        what="one device",
        fallback="ddp",
        memory_rule="Unshared",
        one_process=True,
        no_nccl_reason="one GPU has no other to send to",
        compiles=True,
        batch_searchable=True,
        allows_warm_trials=True,
        runs_in_trainer=True,
        accelerate_type="NO",
    ),
    StrategyEntry(
        name="dp",
        path="base:DataParallelStrategy",
        wrapper="DataParallel",
        what="one process, a thread a GPU, the model copied every step",
        speed="slower than ddp, its first GPU does more",
        axes=("dp",),
        fallback="ddp",
        memory_rule="Copied",
        one_process=True,
        needs_gpus_reason="copies the model to each of two or more GPUs from one process",
        runs_in_trainer=True,
    ),
    StrategyEntry(
        name="ddp",
        path="base:DistributedDataParallelStrategy",
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
        path="base:ShardedDataParallel",
        wrapper="FSDPModule",
        what="weights, gradients and states cut over devices, gathered block by block",
        speed="moves 1.5x ddp's data",
        memory="1/N of the model plus one gathered block",
        axes=("dp",),
        shards=ALL_STATE_PARTS,
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
    _ZERO2_OFFLOAD,
    _ZERO3_OFFLOAD,
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
        path="pipeline:SpreadLayers",
        wrapper="none",
        what="whole layers on each GPU, one at a time",
        speed="one GPU works at a time",
        memory="1/N of the layers",
        axes=("mp",),
        fallback="pp",
        memory_rule="Staged",
        one_process=True,
        needs_gpus_reason="puts layers on each of two or more GPUs from one process",
        no_nccl_reason="one process copies its activations between GPUs itself",
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
        shards=ALL_STATE_PARTS,
        parameter_form=SLICES,
        knobs=(*TENSOR_KNOBS, "reshard"),
        fallback="fsdp",
        memory_rule="FullySharded",
    ),
    replace(
        _PIPELINE, name="ddp+pp", what="pipelines side by side", speed="", memory="", axes=("dp", "pp"), fallback="ddp"
    ),
    StrategyEntry(
        name="ddp+tp+pp",
        path="tensor_pipeline:DataTensorPipeline",
        wrapper="DTensor+DistributedDataParallel",
        what="ddp+pp with stages cut by tp (3D)",
        axes=("dp", "pp", "tp"),
        parameter_form=SLICES,
        knobs=("tp_degree", *PIPELINE_KNOBS),
        fallback="ddp+tp",
        memory_rule="Staged",
    ),
    StrategyEntry(
        name="fsdp+tp+pp",
        path="tensor_pipeline:ShardedTensorPipeline",
        wrapper="DTensor+FSDPModule",
        what="the same with fsdp",
        axes=("dp", "pp", "tp"),
        shards=ALL_STATE_PARTS,
        parameter_form=SLICES,
        knobs=("tp_degree", *PIPELINE_KNOBS, "reshard"),
        fallback="fsdp+tp",
        memory_rule="Staged",
    ),
)
STRATEGIES = {entry.name: entry for entry in _STRATEGIES}
"""All strategies, by name."""

_SCHEDULES = (
    ScheduleEntry(name="gpipe", wrapper="ScheduleGPipe"),
    ScheduleEntry(name="1f1b", wrapper="Schedule1F1B"),
    ScheduleEntry(name="interleaved", wrapper="ScheduleInterleaved1F1B", stages_per_rank=2),
)
SCHEDULES = {entry.name: entry for entry in _SCHEDULES}
"""All pipeline schedules, by name."""

OUR_TENSOR_PLANS: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "h.*.attn.c_attn": "packed_colwise",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
    "bert": {
        "encoder.layer.*.attention.self.query": "colwise",
        "encoder.layer.*.attention.self.key": "colwise",
        "encoder.layer.*.attention.self.value": "colwise",
        "encoder.layer.*.attention.output.dense": "rowwise",
        "encoder.layer.*.intermediate.dense": "colwise",
        "encoder.layer.*.output.dense": "rowwise",
    },
}
"""Plans of tensor parallelism for families without one in transformers; the styles are transformers' own names."""
TENSOR_STYLES = {
    "colwise",
    "rowwise",
    "packed_colwise",
    "moe_tp_experts",
    "replicated_with_grad_allreduce",
    "colwise_gather_output",
    "colwise_rep",
}
"""Ways of cutting a layer that `strategies/tensor_parallel.py` has, by transformers' names."""
EXPERT_STYLES = {"grouped_gemm", "ep_dispatch_experts"}
"""The styles of transformers' plans of expert parallelism."""
SEQUENCE_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""The families that sequence parallelism can split: blocks of llama's layout, without dropout between the matrices."""
PIPELINE_OBJECTIVES: Mapping[str, tuple[str, ...]] = {
    "llama": ("causal-lm",),
    "mistral": ("causal-lm",),
    "qwen3": ("causal-lm",),
    "mixtral": ("causal-lm",),
    "gpt2": ("causal-lm",),
    "bert": ("masked-lm", "sequence-classification"),
}
"""The objectives with which each family can be cut into stages; the cuts are in `strategies/pipeline.py`."""


def nearest_strategy(entry: StrategyEntry, works: Callable[[StrategyEntry], bool]) -> str:
    """Name of the nearest strategy that asks for less and `works`; single if there is none."""
    for _ in STRATEGIES:
        entry = STRATEGIES[entry.fallback]
        if works(entry):
            return entry.name
    return "single"


def strategies_obeying(knob: str) -> tuple[str, ...]:
    """Names of the strategies that obey a knob of `StrategyEntry.knobs`."""
    return tuple(name for name, entry in STRATEGIES.items() if knob in entry.knobs)
