"""The optimizers, one entry each. Standard library only."""

from __future__ import annotations

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
    """Name of the class of the object that runs, to compare what ran with what was asked."""
    implementation: str | None = None
    """Name of the loop of torch that runs: loop, foreach, fused; None where the entry does not decide it."""
    what: str
    speed: str = ""
    memory: str = ""
    state_tensors: int = 2
    """Tensors of state of a parameter's own size, without numbers such as a step count.

    Used for estimates before a model is traced; a trace counts the states of the live optimizer.
    """
    eight_bit: bool = False
    """True if an element of the states takes one byte."""
    loop_scratch: int = 2
    """Temporaries of a parameter's size that torch's loop over parameters (`_single_tensor_adamw`) holds at once, with
    weight decay; AdamW has two: the root of the second moment, and the quotient.

    Used for the flat slices of ZeRO, which no trace sees.
    """
    refuses: tuple[tuple[str, str], ...] = ()
    """Forms of parameters that the optimizer cannot work with, each with the reason."""
    package: str | None = None
    """The package that has to be installed."""
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
    eight_bit=True,
    refuses=(
        (SLICES, "quantizes plain tensors"),
        (SWAPPED, "keeps its quantized states per parameter"),
        (HOST, "quantizes states on the GPU"),
    ),
    package="bitsandbytes",
    trainer_name="adamw_bnb_8bit",
)
_NEEDS_MATRICES_REASON = "factors whole matrices"
"""The reason that Adafactor cannot work with flat slices."""
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
        refuses=(
            (SLICES, "reads whole matrices"),
            (FLAT, _NEEDS_MATRICES_REASON),
            (SWAPPED, _NEEDS_MATRICES_REASON),
            (HOST, _NEEDS_MATRICES_REASON),
        ),
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
