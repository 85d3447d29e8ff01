"""The levers: knobs that change how a step is computed, not its samples; one entry each. Standard library only.

A lever is an entry here and one file in `worker/levers`, whose function the worker calls on the built model before its
weights are initialized. The tracer builds the same model, so memory is predicted without a rule. The knob table, the
rules of compatibility, the exports, a best-fit search and the verdict on what ran all read this table.
At the end are the fields of TrainingArguments that stand for levers, as transformers has named them over time.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

TrainerFields = tuple[tuple[str, object], ...]


@dataclass(frozen=True, kw_only=True)
class LeverValue:
    """One value of a lever. `what`, `speed` and `memory` are its help, and say where it loses."""

    name: str
    what: str = ""
    speed: str = ""
    memory: str = ""
    path: str | None = None
    """`module:function` below `worker/levers`, called with the model and the knobs; None changes no model."""
    recomputed: float = 0.0
    """Share of the layers' forward that the backward computes again; of `selective` too little to count."""
    tolerance: float | None = 0.0
    """Greatest relative difference of a step's loss from that of the plain value in fp32; None trains differently."""
    objectives: tuple[str, ...] = ()
    """Objectives that have it; empty for all. Likewise the next three."""
    families: tuple[str, ...] = ()
    """Model types that have it."""
    strategies: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()
    needs_gpus_reason: str | None = None
    """The reason that it needs GPUs; None if it runs on a CPU too."""
    min_compute_capability: tuple[int, int] = (0, 0)
    """The first NVIDIA GPUs that have it."""
    halves_on_gpus: bool = False
    """True if on a GPU it computes in fp16 and bf16 alone."""
    package: str | None = None
    """The package that has to be installed; several joined by spaces."""
    install: str = ""
    """pip's arguments that install the package; empty if its name does."""
    versions: tuple[tuple[str, str], ...] = ()
    """Packages, each with the first version that has it."""
    trainer_fields: TrainerFields | None = None
    """Fields of TrainingArguments that set it; None if that has no words for it."""
    allocator_setting: str = ""
    """Setting of PYTORCH_ALLOC_CONF that the training starts with."""
    untraced: str = ""
    """The memory of it that no trace shows, in words."""
    is_any: bool = False
    """True if another tool chooses what runs, so that it is compared with nothing."""
    compiles: bool = True
    """False if the model does not compile with it."""
    is_searched: bool = False
    """True if a best-fit search tries it unless told otherwise."""
    needs_process: bool = False
    """True if only a new process can take it."""
    fallback: str = ""
    """The value to take where this one cannot run; empty for the plain one."""


@dataclass(frozen=True, kw_only=True)
class LeverEntry:
    """A lever: the knob of this name, whose first value is the plain one."""

    name: str
    group: str
    """Group of the knob on the screen."""
    what: str
    values: tuple[LeverValue, ...]
    phases: tuple[str, ...] = ("forward", "backward")
    """The parts of a step that it acts on."""
    is_traced: bool = True
    """True if the trace of forward and backward has its memory."""
    actual: str = ""
    """Field of the record of what ran that has the value; empty if another rule compares it."""
    reads: str = ""
    """The file below `worker/levers` whose `actual` reads what ran, if no value's `path` names it."""
    same_as: tuple[str, str, str] = ("", "", "")
    """Names of the same setting in TrainingArguments, accelerate and DeepSpeed."""
    changes_in_warm_process: bool = True
    redraws_dropout: bool = False
    """True if a value draws other masks of dropout than the plain one, so that losses compare without dropout alone."""

    def __getitem__(self, name: object) -> LeverValue:
        """The value of that name; the plain one for the name of a newer version."""
        return next((value for value in self.values if value.name == name), self.values[0])

    @property
    def plain(self) -> str:
        """Name of the plain value."""
        return self.values[0].name

    def instead(self, value: LeverValue) -> str:
        """The setting to take where this value cannot run."""
        return f"{self.name}={value.fallback or self.plain}"


_HEADS_IN_CHUNKS = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "smollm3"),
    *("gpt2", "gpt_neox", "opt", "bert", "roberta", "distilbert", "modernbert", "t5"),
)
"""Model types whose logits are one matrix product of the last hidden states, then at most a soft cap.

Others scale their logits after it (cohere, granite): each of these was compared with its own forward."""
_WHOLE_HEADS = ("single", "ddp", "fsdp", "zero1", "zero2")
"""Strategies under which a rank's forward has the head's whole weight."""
_TRITON = "runs Triton kernels"
_USE_LIGER: TrainerFields = (("use_liger_kernel", True),)
"""`liger_kernel_config`, which belongs to both knobs, is made with the other fields."""

_CHUNKED = LeverValue(
    name="chunked",
    path="head_loss:chunk_loss",
    what="an eighth of the tokens at a time, whose logits the backward computes again",
    speed="chunked costs one more product with the vocabulary: worth it where the memory buys a larger batch,"
    " a loss for a small vocabulary or few tokens",
    memory="chunked never has all logits: with a vocabulary of 32,000 or more they are most of the peak",
    tolerance=1e-5,
    objectives=("causal-lm", "masked-lm", "seq2seq"),
    families=_HEADS_IN_CHUNKS,
    strategies=_WHOLE_HEADS,
    engines=("native", "accelerate"),
    is_searched=True,
)
LOSS = LeverEntry(
    name="loss",
    group="memory",
    what="How the logits become a loss.",
    values=(
        LeverValue(name="full", what="all logits at once", trainer_fields=()),
        _CHUNKED,
        replace(
            _CHUNKED,
            name="liger",
            path="head_loss:fuse_loss",
            what="is chunked by one Triton kernel of liger-kernel, which computes the gradients in the forward",
            speed="liger needs no product again; with a small vocabulary its kernels cost more than they save",
            memory="liger never has all logits either, but the gradient of the head's weight from the forward on",
            needs_gpus_reason=_TRITON,
            package="liger-kernel",
            trainer_fields=_USE_LIGER,
            untraced="the buffers of Liger's loss, which is traced as chunked",
        ),
    ),
    actual="loss_function",
    same_as=("use_liger_kernel", "", ""),
)

_LAYERS_IN_ONE = (*_WHOLE_HEADS, "zero3", "dp", "tp", "ddp+tp", "fsdp+tp")
"""Strategies under which a rank has every layer: what a stage of a pipeline checkpoints depends on its first layer."""
_EVERY_TEXT = "checkpoints one layer in {0}, the first of each {0}"
_EVERY = tuple(
    LeverValue(
        name=f"every-{count}",
        path="checkpointing:checkpoint",
        recomputed=1 / count,
        what=_EVERY_TEXT.format(count),
        tolerance=1e-6,
        strategies=_LAYERS_IN_ONE,
        trainer_fields=(
            ("gradient_checkpointing", True),
            ("gradient_checkpointing_kwargs", {"use_reentrant": False, "every_n_layers": count}),
        ),
        is_searched=count == 2,
    )
    for count in (2, 3, 4)
)
CHECKPOINTING = LeverEntry(
    name="checkpointing",
    group="memory",
    what="Activation checkpointing: keep only the inputs of each layer and recompute the rest in the backward.",
    values=(
        LeverValue(name="off", trainer_fields=(("gradient_checkpointing", False),), is_searched=True),
        LeverValue(
            name="full",
            path="checkpointing:checkpoint",
            recomputed=1.0,
            speed="full recomputes each layer: about 20-30 % slower",
            memory="with full activations shrink to one layer plus the boundaries between layers",
            tolerance=1e-6,
            trainer_fields=(("gradient_checkpointing", True),),
            is_searched=True,
        ),
        *_EVERY,
        LeverValue(
            name="selective",
            path="checkpointing:checkpoint",
            what="recomputes only what is cheap: it keeps the outputs of matrix products and attention",
            speed="every-N recomputes an Nth of what full does; selective no matrix product, so it loses little, and on"
            " few tokens the time of its bookkeeping",
            memory="between off and full",
            tolerance=1e-6,
            engines=("native", "accelerate"),
        ),
        LeverValue(
            name="offload",
            path="checkpointing:checkpoint",
            recomputed=1.0,
            what="is full with the layers' inputs in host memory",
            speed="offload copies them both ways within the step: slower than full, up to 1.85x without overlap",
            memory="offload frees the boundaries between layers too",
            tolerance=1e-6,
            needs_gpus_reason="moves activations from a GPU to the host",
            trainer_fields=(
                ("gradient_checkpointing", True),
                ("gradient_checkpointing_kwargs", {"use_reentrant": False, "offload": True}),
            ),
        ),
    ),
    actual="checkpointing",
    same_as=("gradient_checkpointing", "", "activation_checkpointing"),
)

_COMPILED = "the buffers of compiled kernels"
COMPILE = LeverEntry(
    name="compile",
    group="compute",
    what="torch.compile of the model: a long first step, then faster ones. A comparison with compile=off says after"
    " how many steps the compilation has paid for itself.",
    values=(
        LeverValue(name="off", trainer_fields=()),
        LeverValue(
            name="default",
            what="the whole model, with single and ddp",
            speed="up to about 2x once compiled; the first step takes tens of seconds",
            memory="fused kernels keep less for the backward; on a CPU the compiler takes some 100 MiB beside",
            tolerance=1e-2,
            trainer_fields=(("torch_compile", True), ("torch_compile_mode", "default")),
            untraced=_COMPILED,
            is_searched=True,
        ),
        LeverValue(
            name="reduce-overhead",
            what="is default replayed from CUDA graphs, unless grad_accum is above 1",
            speed="reduce-overhead also saves the launches: most for small batches, nothing where kernels fill the GPU",
            memory="the graphs keep a memory of their own",
            tolerance=1e-2,
            needs_gpus_reason="replays CUDA graphs",
            trainer_fields=(("torch_compile", True), ("torch_compile_mode", "reduce-overhead")),
            untraced=_COMPILED,
            is_searched=True,
        ),
        LeverValue(
            name="blocks",
            what="each block by itself, also with fsdp: alike blocks share one program",
            speed="blocks compile in a fraction of default's time, and fuse nothing across a block's ends",
            tolerance=1e-2,
            strategies=("single", "ddp", "fsdp"),
            untraced=_COMPILED,
            is_searched=True,
        ),
        LeverValue(
            name="max-autotune",
            what="is reduce-overhead with kernels that are timed first, in minutes",
            tolerance=1e-2,
            trainer_fields=(("torch_compile", True), ("torch_compile_mode", "max-autotune")),
            untraced=_COMPILED,
        ),
    ),
    reads="blocks",
    same_as=("torch_compile", "dynamo_backend", ""),
    changes_in_warm_process=False,
    redraws_dropout=True,
)

_KERNEL = "attention_kernel:choose"
_FLASH = LeverValue(
    name="flash",
    path=_KERNEL,
    what="the package flash-attn (fp16 or bf16)",
    tolerance=1e-2,
    needs_gpus_reason="is a GPU kernel",
    fallback="sdpa",
    halves_on_gpus=True,
    min_compute_capability=(8, 0),
    package="flash-attn",
    install="flash-attn --no-build-isolation",
    is_searched=True,
)
ATTENTION = LeverEntry(
    name="attention",
    group="compute",
    what="Attention kernel. auto is sdpa where the model has it, else eager.",
    values=(
        LeverValue(name="auto", path=_KERNEL, is_any=True),
        LeverValue(
            name="eager",
            path=_KERNEL,
            what="writes the whole score matrix",
            memory="eager keeps scores of heads x seq_len^2 a sample and layer; the others do not",
            tolerance=1e-3,
            is_searched=True,
        ),
        LeverValue(
            name="sdpa",
            path=_KERNEL,
            what="torch's own choice of the next three",
            speed="sdpa is faster than eager, more so on long sequences",
            tolerance=1e-3,
            is_any=True,
        ),
        LeverValue(
            name="sdpa-flash",
            path=_KERNEL,
            what="torch's flash, on a GPU in fp16 and bf16 without a mask",
            tolerance=1e-3,
            halves_on_gpus=True,
            min_compute_capability=(8, 0),
        ),
        replace(
            _FLASH,
            name="sdpa-cudnn",
            what="cuDNN's, in fp16 and bf16",
            speed="sdpa-cudnn can be the fastest on Hopper, and slower than sdpa-flash on an A100",
            package=None,
            install="",
            versions=(("torch", "2.5"),),
        ),
        LeverValue(
            name="sdpa-efficient",
            path=_KERNEL,
            what="xFormers', also in fp32 and with a mask",
            speed="sdpa-efficient is torch's choice where flash has no kernel, and slower where it has",
            tolerance=1e-3,
            needs_gpus_reason=_FLASH.needs_gpus_reason,
            fallback="sdpa",
        ),
        _FLASH,
        replace(
            _FLASH,
            name="flash-3",
            what="its third version, for Hopper, built from its source",
            speed="kernels differ most on long sequences, and little below 2,048 tokens",
            min_compute_capability=(9, 0),
            package="flash_attn_3",
            install="--no-build-isolation 'git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper'",
            versions=(("transformers", "4.54"),),
        ),
    ),
    actual="attention_kernel",
    same_as=("attn_implementation (of the model)", "attn_implementation", ""),
    redraws_dropout=True,
)

KERNELS = LeverEntry(
    name="kernels",
    group="compute",
    what="Kernels of norms, rotary embeddings and MLPs; the loss has a knob of its own.",
    values=(
        LeverValue(name="off", trainer_fields=()),
        LeverValue(
            name="liger",
            path="liger:use_kernels",
            what="those of the package liger-kernel, for the model types that it knows",
            speed="fewer passes over memory: faster for large models, slower than torch for some of about 1B",
            memory="norms and MLPs keep less for the backward",
            tolerance=1e-3,
            strategies=("single", "ddp", "fsdp", "zero1", "zero2", "zero3"),
            needs_gpus_reason=_TRITON,
            package="liger-kernel",
            trainer_fields=_USE_LIGER,
            # It replaces functions of transformers' modules.
            needs_process=True,
            untraced="the activations that Liger's kernels do not keep",
            is_searched=True,
        ),
    ),
    is_traced=False,
    actual="kernels",
    same_as=("use_liger_kernel", "", ""),
)

ALLOCATOR = LeverEntry(
    name="allocator",
    group="memory",
    what="torch's allocator of GPU memory. A setting of your own in PYTORCH_ALLOC_CONF stays.",
    values=(
        LeverValue(name="default", trainer_fields=(), is_any=True),
        LeverValue(
            name="expandable",
            what="grows its segments instead of adding others (expandable_segments). Tensors shared with another"
            " process by CUDA IPC, as vLLM and some loaders do, fail with it on some drivers",
            speed="slower while it grows, then the same; faster where the allocator had to retry",
            memory="less reserved memory lies between allocations: most where sizes change from step to step, little"
            " where they are all the same",
            needs_gpus_reason="sets the CUDA allocator",
            allocator_setting="expandable_segments:True",
            needs_process=True,
            is_searched=True,
        ),
    ),
    phases=(),
    is_traced=False,
    actual="allocator",
    reads="cuda_allocator",
    same_as=("PYTORCH_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
)

ATTENTION_IMPLEMENTATIONS: dict[str, str | None] = {
    "auto": None,
    "eager": "eager",
    **dict.fromkeys(("sdpa", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient"), "sdpa"),
    "flash": "flash_attention_2",
    "flash-3": "flash_attention_3",
}
"""`attention` as transformers' `attn_implementation`; with None transformers takes sdpa if the model has it."""


def compile_mode(value: str, grad_accum: int) -> str:
    """torch.compile's mode, without CUDA graphs if gradients accumulate over micro-batches.

    A replay of a CUDA graph overwrites the gradients of the last one (torch/_inductor, cudagraph_trees.py).
    """
    without_graphs = {"max-autotune": "max-autotune-no-cudagraphs", "reduce-overhead": "default"}
    mode = without_graphs.get(value, value) if grad_accum != 1 else value
    return "default" if mode == "blocks" else mode


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables with the settings of torch's CUDA allocator, the newer name first."""

METHOD = LeverEntry(
    name="method",
    group="compute",
    what="Which parameters are trained.",
    values=(
        LeverValue(name="full", what="all of them", trainer_fields=()),
        LeverValue(
            name="lora",
            path="lora:put_adapters",
            what="peft's LoRA: the model is frozen, and each targeted layer gets two trained matrices of lora_rank,"
            " fp32 also in bf16-pure, scaled by 1, without dropout",
            speed="lora computes 4N FLOPs a token, not 6N, as frozen weights get no gradients; two small products more"
            " a targeted layer, which a small model pays for",
            memory="lora has no gradients and states of the frozen parameters, and nearly the activations of full",
            tolerance=None,
            strategies=("single", "ddp", "fsdp"),
            package="peft",
        ),
        LeverValue(
            name="qlora",
            path="lora:put_adapters",
            what="the matrices of the blocks besides in four bits (bitsandbytes' NF4, double quantization), computing"
            " in bf16, with precision=fp16 in fp16; embeddings, norms and the head as in lora",
            speed="qlora makes each matrix half precision again at each use: slower than lora on a GPU, on a CPU as"
            " fast as its half-precision products are",
            memory="qlora takes half a byte a weight of the blocks, and one matrix in half precision at a time",
            tolerance=None,
            strategies=("single", "ddp"),
            package="peft bitsandbytes",
            compiles=False,
        ),
    ),
    phases=("forward", "backward", "optimizer"),
    actual="method",
    same_as=("(LoraConfig of peft)", "(LoraConfig of peft)", ""),
    changes_in_warm_process=False,
)
WITH_ADAPTERS = tuple(value.name for value in METHOD.values if value.tolerance is None)
"""Values of `method` that freeze the model and train adapters, which `ADAPTER_KNOBS` describe."""
ADAPTER_KNOBS = ("lora_rank", "lora_targets")
KINDS_OF_LAYERS = ATTENTION_LAYERS, ALL_LAYERS = "attention", "all"
"""Values of `lora_targets` that are no names of layers."""

LEVERS = {entry.name: entry for entry in (METHOD, CHECKPOINTING, LOSS, ATTENTION, COMPILE, KERNELS, ALLOCATOR)}
"""All levers, by name, in the order in which they change a model."""


def has_liger_kernels(modules: Iterable[Any]) -> bool:
    """True if liger-kernel has replaced the forward of one of these live modules."""
    functions = (getattr(module.forward, "__func__", None) for module in modules)
    return any(getattr(function, "__module__", "").startswith("liger_kernel") for function in functions)


def lever_packages() -> Iterable[str]:
    """Packages that some value needs, or needs a version of."""
    for entry in LEVERS.values():
        for value in entry.values:
            yield from (value.package or "").split()
            yield from (name for name, _ in value.versions)


_FIELD, _ARGUMENTS = "gradient_checkpointing", "gradient_checkpointing_kwargs"
NEWER_NAMES = {_FIELD: "activation_checkpointing", _ARGUMENTS: "activation_checkpointing_kwargs"}
"""Fields by their first names, with the names that took their place."""
FIRST_VERSIONS = {**dict.fromkeys(NEWER_NAMES.values(), (5, 23)), "train_sampling_strategy": (5, 2)}
"""The first version of transformers with a field that an older one has by another name."""


LEVERS_TAKEN = {
    name: tuple(value.name for value in entry.values if value.trainer_fields is not None)
    for name, entry in LEVERS.items()
    if any(value.trainer_fields for value in entry.values[1:])
}
"""The values that fields can give each lever."""


def named_fields(fields: Mapping[str, object], has: Callable[[str], bool]) -> dict[str, object]:
    """Return these fields by their names in a version; `has` tells which names it has."""
    named: dict[str, object] = {}
    for name, value in fields.items():
        newer = NEWER_NAMES.get(name, name)
        if name == "train_sampling_strategy" and not has(name):
            named["group_by_length"] = value == "group_by_length"
        elif name == _ARGUMENTS and not has(newer):
            named[name] = {"use_reentrant": False}  # arguments of torch only: it checkpoints every layer
        else:
            named[newer if has(newer) else name] = value
    return named


def levers_of_fields(read: Callable[[str, None], Any]) -> dict[str, str]:
    """Return the levers' values that the fields of TrainingArguments have; `read` gives a field, else its default."""
    values = {name: _value_of(LEVERS[name], read) for name in LEVERS_TAKEN}
    layers = (_field(_ARGUMENTS, read) or {}).get("every_n_layers") or 1
    if values["checkpointing"] == "full" and layers > 1:
        values["checkpointing"] = f"every-{layers}"
    if read("torch_compile", None):
        # With accumulation max-autotune is the Trainer's mode without CUDA graphs.
        values["compile"] = (read("torch_compile_mode", None) or "default").replace("-no-cudagraphs", "")
    kernels = _field("liger_kernel_config", read) or {}
    for name, kernel in (("kernels", "rms_norm"), ("loss", "fused_linear_cross_entropy")):
        # One switch for both, and a part that is not named is on.
        values[name] = values[name] if kernels.get(kernel, True) else LEVERS[name].plain
    return values


def _value_of(entry: LeverEntry, read: Callable[[str, None], Any]) -> str:
    """The value all of whose fields these are: of several the one with most."""
    best, name = -1, entry.plain
    for value in entry.values:
        fields = dict(value.trainer_fields or ())
        if value.trainer_fields and best < len(fields) and all(_is(_field(key, read), fields[key]) for key in fields):
            best, name = len(fields), value.name
    return name


def _field(name: str, read: Callable[[str, None], Any]) -> Any:
    newer = read(NEWER_NAMES.get(name, name), None)
    value = read(name, None) if newer is None else newer
    # A flag's text is JSON until the arguments are complete.
    return json.loads(value) if isinstance(value, str) and value.startswith("{") else value


def _is(live: Any, asked: Any) -> bool:
    """True if the field has what was asked for; how torch checkpoints is no part of it."""
    if not isinstance(asked, dict):
        return bool(live) == asked if isinstance(asked, bool) else bool(live == asked)
    return all((live or {}).get(key) == value for key, value in asked.items() if key != "use_reentrant")
