"""The optimizers, one entry each. Standard library only."""

from dataclasses import dataclass, replace

from .strategies import FLAT, HOST, PARAMETER_FORMS, SLICES, SWAPPED, StrategyEntry


@dataclass(frozen=True, kw_only=True)
class OptimizerEntry:
    """An optimizer, which updates the weights. `what`, `speed` and `memory` are its help."""

    name: str
    path: str
    """`module:Class`, a leading dot for a file in `model`; called with parameter groups, `lr` and `arguments`.

    The groups set `weight_decay`, which the knob means as decoupled: a class that adds it to the gradient by default
    gets the argument that changes that, as NAdam and RAdam do with `decoupled_weight_decay`; one without such an
    argument, as Adamax, needs a subclass.
    """
    arguments: tuple[tuple[str, bool], ...] = ()
    class_name: str
    """Name of the class of the object that runs, to compare what ran with what was asked; from `class_name`."""
    implementation: str | None = None
    """Name of the loop of torch that runs: loop, foreach, fused; None where the entry does not decide it."""
    what: str
    speed: str = ""
    memory: str = ""
    state_tensors: int = 2
    """Tensors of state of a parameter's own size, without numbers such as a step count.

    Used for estimates before a model is traced; a trace counts the states of the live optimizer.
    """
    state_bytes: float | None = None
    """Bytes of an element of the states, scales included; None if the states have the parameters' format."""
    loop_scratch: int = 2
    """Temporaries of a parameter's size that torch's loop over parameters (`_single_tensor_adamw`) holds at once, with
    weight decay; AdamW has two: the root of the second moment, and the quotient.

    Used for the flat slices of ZeRO, which no trace sees.
    """
    refuses: tuple[tuple[str, str], ...] = ()
    """Forms of parameters that the optimizer cannot work with, each with the reason."""
    early_reason: str | None = None
    """The way in which the optimizer takes gradients during the backward, before they can be averaged, clipped or
    unscaled; None if it reads them in its step."""
    package: str | None = None
    """The package that has to be installed."""
    min_version: str | None = None
    """The first version of `package` with the optimizer; None for any."""
    compiles: bool = False
    """True if torch compiles the optimizer's step, once for each shape of a parameter, in the first step."""
    splits_matrices: bool = False
    """True if the matrices of the layers are a group of their own, with `matrices` set."""
    needs_gpus_reason: str | None = None
    """The reason the optimizer needs GPUs; None if it runs on a CPU too."""
    fallback: str = "adamw-fused"
    """The optimizer to take where this one cannot run."""
    trainer_name: str | None = None
    """The optimizer's name in transformers' OptimizerNames.

    None: the Trainer gets the class itself, and exports say that the optimizer is left out.
    """

    def refusal(self, strategy: StrategyEntry) -> str | None:
        """The reason the optimizer cannot work with a strategy; None if it can."""
        if self.early_reason is not None and not strategy.one_device:
            return f"{self.early_reason}, and strategy={strategy.name} is not of one GPU"
        reason = dict(self.refuses).get(strategy.parameter_form)
        if reason is None:
            return None
        return f"{reason}, and with strategy={strategy.name} {PARAMETER_FORMS[strategy.parameter_form]}"


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
    state_bytes=1.0,
    refuses=(
        (SLICES, "quantizes plain tensors"),
        (SWAPPED, "keeps its quantized states per parameter"),
        (HOST, "quantizes states on the GPU"),
    ),
    package="bitsandbytes",
    trainer_name="adamw_bnb_8bit",
)
_LOW_BIT = OptimizerEntry(
    name="adamw-8bit-ao",
    path="torchao.optim:AdamW8bit",
    class_name="torchao.AdamW8bit",
    what="AdamW with states that torchao quantizes, whose step torch compiles",
    speed="about 9 % slower than AdamW on a GPU, several times on a CPU; its start compiles for seconds or minutes",
    memory="2 bytes of states a parameter",
    # A scale of four bytes for each block of 256.
    state_bytes=1 + 4 / 256,
    package="torchao",
    min_version="0.11",
    compiles=True,
    fallback="adamw-8bit",
    trainer_name="adamw_torch_8bit",
)
_WHOLE_MATRICES = tuple((form, "needs whole matrices") for form in (SLICES, FLAT, SWAPPED, HOST))
"""The forms that an optimizer of matrices refuses."""
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
        needs_gpus_reason="pages its states between a GPU and the host",
        fallback="adamw-8bit",
        trainer_name="paged_adamw_8bit",
    ),
    _LOW_BIT,
    # Llama-2 7B in bf16 on an A100: fused AdamW 51.6 GB and 3200 tokens/s, 8-bit 39.1 and 4-bit 33.2 GB at 2900
    # (torchao/optim/README.md).
    replace(
        _LOW_BIT,
        name="adamw-4bit",
        path="torchao.optim:AdamW4bit",
        class_name="torchao.AdamW4bit",
        what="adamw-8bit-ao with states of 4 bits",
        speed="as adamw-8bit-ao; slower on a CPU",
        memory="1 byte of states a parameter",
        # A scale of four bytes for each block of 128.
        state_bytes=0.5 + 4 / 128,
        # 26 bytes an element (live_bytes.COMPILED_STEP_BYTES).
        loop_scratch=7,
        trainer_name="adamw_torch_4bit",
    ),
    # ViT-giant in bf16 with checkpointing on a 4070 Ti: 1.27 s and 9.82 GB without, 1.52 s and 5.24 GB offloaded;
    # ZeRO-Offload 3.13 s and 6.85 GB (torchao/optim/README.md).
    OptimizerEntry(
        name="adamw-offload",
        path="torchao.optim:CPUOffloadOptimizer",
        class_name="CPUOffloadOptimizer",
        what="AdamW on the host, which keeps the states; gradients are copied there during the backward",
        speed="slower than AdamW, less so in bf16-pure and with more grad_accum; compile undoes its overlap",
        memory="no states on the GPU; 16 bytes a parameter of page-locked host memory",
        state_tensors=0,
        early_reason="copies gradients to the host during the backward",
        package="torchao",
        min_version="0.11",
        needs_gpus_reason="updates on the host what a GPU trains",
    ),
    OptimizerEntry(
        name="muon",
        path=".muon:MuonAdamW",
        class_name="MuonAdamW",
        what="Muon for the matrices of the layers, AdamW for embeddings, head and vectors; trains differently",
        speed="15 matrix products more for each matrix and step: felt with small batches, slow on a CPU",
        memory="4 bytes of states a parameter of the layers",
        state_tensors=1,
        refuses=_WHOLE_MATRICES,
        package="torch",
        min_version="2.9",
        splits_matrices=True,
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
        refuses=_WHOLE_MATRICES,
        trainer_name="adafactor",
    ),
    OptimizerEntry(
        name="sgd",
        path="torch.optim:SGD",
        class_name="SGD",
        what="no momentum",
        memory="no states",
        state_tensors=0,
        # The gradient with the decay added; without momentum that is the same as decoupled decay.
        loop_scratch=1,
        trainer_name="sgd",
    ),
)
OPTIMIZERS = {entry.name: entry for entry in _OPTIMIZERS}
"""All optimizers, by name."""


def nearest_optimizer(entry: OptimizerEntry, strategy: StrategyEntry) -> str:
    """Name of the nearest optimizer that works with a strategy."""
    while entry.refusal(strategy):
        entry = OPTIMIZERS[entry.fallback]
    return entry.name
