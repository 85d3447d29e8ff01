"""Fields of the catalog's entries: strategies, optimizers, engines, schedules of pipelines. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

WHOLE, SLICES, FLAT, SWAPPED, HOST = "whole", "slices", "flat", "swapped", "host"
"""Ways in which an optimizer is given parameters; see `PARAMETER_FORMS`."""
PARAMETER_FORMS = {
    WHOLE: "it is given whole parameters",
    SLICES: "a rank has slices (DTensors)",
    FLAT: "it is given flat slices",
    SWAPPED: "it is given flat slices, others at every step",
    HOST: "it is given flat slices on the CPU",
}
"""The same in the words of a refusal."""


@dataclass(frozen=True, kw_only=True)
class StrategyEntry:
    """A way to spread a model and its batches over devices; `what`, `speed` and `memory` are its help."""

    name: str
    path: str
    """`module:Class` below worker/strategies."""
    wrapper: str | None
    """Classes of the live wrappers, joined by + in alphabetical order; None where `pp_schedule` decides."""
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
    """True if all its devices belong to one process."""
    needs_gpus_because: str | None = None
    """Use of the GPUs, for a strategy that cannot run on the CPU."""
    no_nccl_because: str | None = None
    """The reason why NCCL is never called."""
    zero_stage: int | None = None
    offloads: bool = False
    """True if optimizer states leave the device."""
    compiles: bool = False
    """True if torch.compile works with it."""
    batch_searchable: bool = False
    """True if a batch search can give its ranks another batch size while they run."""
    allows_warm_trials: bool = False
    """True if one process can train one setting after another with it."""
    runs_in_trainer: bool = False
    """True if transformers' Trainer can be told to do the same."""
    accelerate_type: str | None = None
    """Accelerate's distributed_type; None where it has none."""

    @property
    def one_device(self) -> bool:
        """True if it uses one device only."""
        return self.one_process and not self.axes

    @property
    def model_axis(self) -> str | None:
        """The axis that cuts the model, tp or pp; None for a strategy without."""
        return next((axis for axis in self.axes if axis in ("tp", "pp")), None)

    @property
    def tensor(self) -> bool:
        """True if it cuts each matrix."""
        return "tp" in self.axes

    @property
    def pipeline(self) -> bool:
        """True if each rank has a stage of a pipeline."""
        return "pp" in self.axes

    @property
    def zero(self) -> bool:
        """True if it is one of DeepSpeed's."""
        return self.zero_stage is not None


@dataclass(frozen=True, kw_only=True)
class OptimizerEntry:
    """An optimizer, which updates the weights. `what`, `speed` and `memory` are its help."""

    name: str
    path: str
    """`module:Class`, a leading dot for a file of the worker; called with parameter groups, `lr` and `arguments`.

    The groups set `weight_decay`, which the knob means as decoupled: a class that adds it to the gradient by default
    gets the argument that changes that.
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
    """True if their elements take a byte each."""
    refuses: tuple[tuple[str, str], ...] = ()
    """Ways of being given parameters that it cannot work with, and why."""
    package: str | None = None
    """The package that has to be installed."""
    needs_gpus_because: str | None = None
    """The reason why it is no use on the CPU."""
    fallback: str = "adamw-fused"
    """The optimizer to take where it cannot run."""
    trainer_name: str | None = None
    """Its name in transformers' OptimizerNames.

    None: the Trainer gets the class itself, and exports say that the optimizer is left out.
    """

    def refusal(self, strategy: StrategyEntry) -> str | None:
        """The reason why it cannot work with a strategy; None when it can."""
        why = dict(self.refuses).get(strategy.parameter_form)
        if why is None:
            return None
        return f"{why}, and with strategy={strategy.name} {PARAMETER_FORMS[strategy.parameter_form]}"


@dataclass(frozen=True, kw_only=True)
class EngineEntry:
    """An engine, which runs the loop. `what` and `speed` are the help a person reads."""

    name: str
    path: str
    """`module:Class` below worker/engines."""
    what: str
    speed: str = ""
    strategies: tuple[str, ...] = ()
    """Strategies it can run; empty for all."""
    compiles: bool = True
    """True if it obeys the `compile` knob."""
    allows_warm_trials: bool = False
    """True if one process can train one setting after another with it."""
    fp16_on_cpu: bool = True
    """False if it silently trains in fp32 where fp16 is asked for on a CPU."""
    package: str | None = None
    """The package that has to be installed."""
    fallback: str = "native"

    def runs(self, strategy: str) -> bool:
        """True if it can run a strategy of this name."""
        return not self.strategies or strategy in self.strategies


@dataclass(frozen=True, kw_only=True)
class ScheduleEntry:
    """The order in which a pipeline's stages do their forwards and backwards."""

    name: str
    wrapper: str
    """Name of torch's class."""
    stages_per_rank: int = 1
