"""ZeRO by DeepSpeed: optimizer states, gradients and parameters sharded over ranks, or offloaded from the device."""

from __future__ import annotations

import importlib
import logging
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..catalog import STRATEGIES
from ..invalid import InvalidInput
from ..model.optimizer import build_optimizer, parameter_groups
from ..model.precision import HALF_DTYPE, dtype_name
from ..model.weights import init_in_turn, init_weights
from ..shared.offload_scratch import Scratch
from ..spec import Knobs
from .ddp import DistributedDataParallelStrategy
from .engine_precision import EnginePrecision
from .extension_builds import build_failure
from .zero_config import deepspeed_config, unpartitioned_sizes

IMPORTED_LATER = (
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.bf16_optimizer",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
)
"""Imported while DeepSpeed makes an engine: 40 MiB, with torch's compiler, that must not count as the training's."""

ENGINE_DTYPE = {**HALF_DTYPE, "bf16-pure": torch.bfloat16}
"""Dtype that the engine casts the model to; the optimizer has the fp32 masters."""


class DeepSpeedZero(DistributedDataParallelStrategy):
    """zero1, zero2, zero3 and the two with offload: DeepSpeed's engine around the same loop."""

    module: Any
    """DeepSpeed's engine."""
    precision: EnginePrecision
    """DeepSpeed casts and scales itself."""

    def __init__(self, knobs: Knobs, device: torch.device) -> None:
        super().__init__(knobs, device)
        self.entry = STRATEGIES[knobs.strategy]
        self.cpu_adam = False
        self.optimizer_reason: str | None = None
        """The reason torch's AdamW updates offloaded states; None if it does not."""
        self.scratch: Scratch | None = None
        self.config: dict[str, Any] = {}
        self.precision = EnginePrecision(knobs.precision, device)

    def start(self) -> None:
        """Join the group, hand it to DeepSpeed, and build the extensions this run will call."""
        super().start()
        deepspeed = _import_deepspeed()
        # Keep DeepSpeed from compiling its shared-memory all-reduce for the CPU, which only inference calls.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
        if self.entry.offloads and self.knobs.optimizer == "adamw":
            failure = build_failure("CPUAdamBuilder", self.enter_phase)
            self.cpu_adam = failure is None
            if failure is not None:
                self.optimizer_reason = f"torch's AdamW instead of DeepSpeedCPUAdam, which is faster: {failure}"
        if self.knobs.offload_path is not None and build_failure("AsyncIOBuilder", self.enter_phase):
            raise InvalidInput(
                "offload_path needs DeepSpeed's async_io extension, which cannot be built here; output.log says why",
                key="offload_path",
                allowed=["leaving offload_path out: the states stay in host memory"],
            )

    def prepare(self, model: nn.Module) -> None:
        """Make the engine; the optimizer inside it has the groups that hold the learning rate."""
        import deepspeed

        self.config = deepspeed_config(
            self.knobs, self.dp_degree, unpartitioned_sizes(model), self.device.type, self._offload_directory()
        )
        if self.entry.zero_stage == 3:
            self._init_slices(model)
        else:
            init_weights(model, self.knobs.seed, self.device)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=self._optimizer(model), config=self.config, dist_init_required=False
        )
        self.precision.engine = engine
        self.module, self.optimizer = engine, engine.basic_optimizer

    def run_documents(self) -> dict[str, Any]:
        """DeepSpeed's configuration."""
        return {"deepspeed.json": self.config}

    def sync_context(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Tell the engine which backward ends the step."""
        self.module.set_gradient_accumulation_boundary(is_last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Undo the engine's average over ranks; `loss` needs no division by the accumulation steps either."""
        self.module.backward(loss * self.gradient_factor, scale_wrt_gas=False)

    def optimizer_step(self) -> None:
        """Let the engine clip, step and free the gradients."""
        self.module.step()

    def actual_fields(self, module: Any) -> dict[str, Any]:
        """Read the stage from the engine's optimizer, not from its configuration."""
        return {
            "wrapper": type(module).__name__,
            "reduce_dtype": dtype_name(module.communication_data_type),
            "zero_stage": live_stage(module.optimizer),
            "optimizer_reason": self.optimizer_reason,
        }

    def stop(self) -> None:
        """Leave as in DDP, and remove the states offloaded to a disk."""
        super().stop()
        if self.scratch is not None:
            self.scratch.remove()

    def _init_slices(self, model: nn.Module) -> None:
        """Initialize part after part; this rank keeps only its slices of each, in the dtype the engine computes in."""
        import deepspeed

        first_parameter: Any = None
        for part in init_in_turn(model, self.knobs.seed, self.device):
            part_parameters = dict.fromkeys(p for module in part.modules for p in module.parameters(recurse=False))
            # A parameter tied to an earlier part is cut already.
            fresh = [parameter for parameter in part_parameters if not hasattr(parameter, "ds_id")]
            for parameter in fresh:
                parameter.data = parameter.data.to(ENGINE_DTYPE.get(self.knobs.precision, torch.float32))
            if first_parameter is None and fresh:
                first_parameter = fresh[0]
                deepspeed.zero.Init(module=nn.ParameterList(fresh), config_dict_or_path=self.config)
            elif fresh:
                first_parameter.convert_to_zero_parameters(param_list=fresh)

    def _offload_directory(self) -> str | None:
        """Directory below `offload_path`, which rank 0 makes for all; None without the knob."""
        if self.knobs.offload_path is None:
            return None
        name: list[str | None] = [None]
        if self.dp_rank == 0:
            self.scratch = Scratch(Path(self.knobs.offload_path).expanduser().absolute())
            name = [str(self.scratch.path)]
        dist.broadcast_object_list(name)
        return name[0]

    def _optimizer(self, model: nn.Module) -> Optimizer:
        """Build the knob's optimizer; for adamw on offloaded states DeepSpeed's vectorized one if it compiles."""
        if not self.cpu_adam:
            return build_optimizer(model, self.knobs)
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        groups = parameter_groups(model, self.knobs.weight_decay)
        states = self.knobs.precision != "bf16-pure"
        optimizer: Optimizer = DeepSpeedCPUAdam(groups, lr=self.knobs.lr, adamw_mode=True, fp32_optimizer_states=states)
        return optimizer


def live_stage(optimizer: Any) -> int | None:
    """ZeRO stage by the class of the engine's optimizer; None for another optimizer."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return 3
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        return 2 if optimizer.partition_gradients else 1
    return 1 if isinstance(optimizer, BF16_Optimizer) else None


def _import_deepspeed() -> Any:
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    for name in IMPORTED_LATER:
        # A version without such a module does not import it later either.
        with suppress(ImportError):
            importlib.import_module(name)
    return deepspeed
