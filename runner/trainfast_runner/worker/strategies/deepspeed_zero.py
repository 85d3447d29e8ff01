"""ZeRO by DeepSpeed: optimizer states, gradients and parameters sharded over ranks, or offloaded from the device."""

import fcntl
import importlib
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..catalog import STRATEGIES
from ..model.optimizer import HALF_DTYPE, Precision, build_optimizer, dtype_name, parameter_groups
from ..model.weights import init_in_turn, init_weights, parts
from ..shared.host import make_private, wait_for_lock
from ..spec import Knobs
from .base import DistributedDataParallelStrategy

IMPORTED_LATER = (
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.bf16_optimizer",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
)
"""Imported while DeepSpeed makes an engine: 40 MiB, with torch's compiler, that must not count as the training's."""

ENGINE_DTYPE = {**HALF_DTYPE, "bf16-pure": torch.bfloat16}
"""Dtype that the engine casts the model to; the optimizer has the fp32 masters."""


class EnginePrecision(Precision):
    """No autocast and no scaler of ours; fp16's scale is the engine's."""

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__("tf32" if name == "tf32" else "fp32", device)
        self.scales = name == "fp16"
        self.engine: Any = None

    def initial_scale(self) -> float | None:
        """Return the engine's loss scale, which DeepSpeed keeps on the host; None without scaling."""
        return float(self.engine.optimizer.loss_scale) if self.scales else None

    def skipped_steps(self) -> int:
        """Return the engine's own count."""
        return int(self.engine.skipped_steps) if self.scales else 0

    def scale(self) -> Tensor | None:
        """The loss scale after the last step."""
        scale = self.initial_scale()
        return None if scale is None else torch.full((), scale, device=self.device)


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
        self.config: dict[str, Any] = {}
        self.precision = EnginePrecision(knobs.precision, device)

    def start(self) -> None:
        """Join the group, hand it to DeepSpeed, and build the extensions this run will call."""
        super().start()
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        for name in IMPORTED_LATER:
            # A version without such a module does not import it later either.
            with suppress(ImportError):
                importlib.import_module(name)
        # Keep DeepSpeed from compiling its shared-memory all-reduce for the CPU, which only inference calls.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
        if self.entry.offloads and self.knobs.optimizer == "adamw":
            failure = build_failure("CPUAdamBuilder", self.enter_phase)
            self.cpu_adam = failure is None
            if failure is not None:
                self.optimizer_reason = f"torch's AdamW instead of DeepSpeedCPUAdam, which is faster: {failure}"
        if self.knobs.offload_path is not None:
            # The launch has checked its tools; DeepSpeed raises an error of its own for a build that fails.
            build_failure("AsyncIOBuilder", self.enter_phase)

    def prepare(self, model: nn.Module) -> None:
        """Make the engine; the optimizer inside it has the groups that hold the learning rate."""
        import deepspeed

        disk = self.knobs.offload_path
        if disk is not None:
            Path(disk).mkdir(mode=0o700, exist_ok=True)
        self.config = deepspeed_config(self.knobs, self.dp_degree, unpartitioned_sizes(model), self.device.type, disk)
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
    name = type(optimizer).__name__
    if name == "DeepSpeedZeroOptimizer":
        return 2 if optimizer.partition_gradients else 1
    return {"DeepSpeedZeroOptimizer_Stage3": 3, "BF16_Optimizer": 1}.get(name)


LARGEST_BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's default, in which a bucket is allocated whole for any model: 2 GB in fp32."""
MAX_LIVE_ELEMENTS = 1_000_000_000
"""DeepSpeed's own bound on the elements that ZeRO-3 keeps gathered."""
ALIGNED_ELEMENTS = 65_536
"""The size of a buffer is a multiple of this, for the alignment of the disk."""
NEVER_PRINT_STEPS = 1_000_000_000
"""More steps than a run takes, so that DeepSpeed prints no progress."""


class Sizes(NamedTuple):
    """Elements of a model's parameters: of all, of the largest one, and of the largest part (`weights.Part`)."""

    total: int
    parameter: int
    part: int


def unpartitioned_sizes(model: nn.Module) -> Sizes:
    """Sizes of a model that is not partitioned yet; each part counts a tied parameter."""
    own = [[p for module in part.modules for p in module.parameters(recurse=False)] for part in parts(model)]
    sizes = [parameter.numel() for parameter in model.parameters()]
    return Sizes(sum(sizes), max(sizes), max(sum(p.numel() for p in set(part)) for part in own))


def deepspeed_config(knobs: Knobs, dp_degree: int, sizes: Sizes, device: str, disk: str | None) -> dict[str, Any]:
    """Make the configuration for `deepspeed.initialize`.

    `device` is cpu or cuda, `disk` the directory for offloaded states; None for host memory.
    """
    entry = STRATEGIES[knobs.strategy]
    bucket = min(LARGEST_BUCKET_ELEMENTS, sizes.part if entry.zero_stage == 3 else sizes.total)
    stage: dict[str, Any] = {"stage": entry.zero_stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if entry.zero_stage == 3:
        # With DeepSpeed's own bounds a model of less than 1e9 parameters stays gathered.
        stage["stage3_max_live_parameters"] = min(MAX_LIVE_ELEMENTS, 2 * sizes.part)
        stage["stage3_max_reuse_distance"] = min(MAX_LIVE_ELEMENTS, sizes.part)
        stage["sub_group_size"] = min(MAX_LIVE_ELEMENTS, sizes.part)
    if entry.offloads:
        # Only a GPU uses page-locked memory.
        offload = {"device": "cpu" if disk is None else "nvme", "pin_memory": device == "cuda"}
        if disk is not None:
            offload["nvme_path"] = disk
        stage["offload_optimizer"] = offload
        if entry.zero_stage == 3 and disk is not None and device == "cuda":
            # Each of five buffers has a rank's share of the largest parameter, with room for the disk's alignment.
            units = -(-sizes.parameter // dp_degree) // ALIGNED_ELEMENTS + 1
            stage["offload_param"] = {**offload, "buffer_size": units * ALIGNED_ELEMENTS}
        elif entry.zero_stage == 3:
            # DeepSpeed 0.19 writes fp32 parameters to a disk as bf16 on a CPU that has no fp16.
            stage["offload_param"] = {"device": "cpu", "pin_memory": device == "cuda"}
    return {
        "train_batch_size": knobs.batch_size * knobs.grad_accum * dp_degree,
        "train_micro_batch_size_per_gpu": knobs.batch_size,
        "gradient_accumulation_steps": knobs.grad_accum,
        # Explicit even when it is 0: DeepSpeed clips at 1.0 by default.
        "gradient_clipping": knobs.grad_clip,
        "zero_optimization": stage,
        # Some of our optimizers are not on DeepSpeed's list; those that would not work are refused before launch.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": NEVER_PRINT_STEPS,
        "wall_clock_breakdown": False,
        **PRECISIONS.get(knobs.precision, {}),
    }


PRECISIONS: dict[str, dict[str, Any]] = {
    "fp16": {"fp16": {"enabled": True, "loss_scale": 0}},
    "bf16": {"bf16": {"enabled": True}},
    "bf16-pure": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
}
"""Half-precision parameters with fp32 masters in the sharded optimizer; bf16-pure keeps no fp32 copy."""


REASON_CHARACTERS = 100
"""Chosen, not measured: the most that a reason quotes of a compiler's error, which output.log has whole."""


def build_failure(builder: str, enter_phase: Callable[[str, str], None]) -> str | None:
    """Build or load one of DeepSpeed's extensions; return the reason for a failure, None on success.

    A build, or the wait for another rank's, is a phase of its own.
    """
    from deepspeed.ops import op_builder

    # torch takes an empty CXX as it is.
    compiler = os.environ.get("CXX", "c++").split()
    if not compiler or not shutil.which(compiler[0]) or not shutil.which("ninja"):
        reason = "no C++ compiler or no ninja on PATH"
        print(f"deepspeed: {builder}: {reason}", file=sys.stderr)
        return reason
    try:
        extension = getattr(op_builder, builder)()
        folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
        if not (folder / extension.name / f"{extension.name}.so").exists():
            enter_phase("compile", f"{builder.removesuffix('Builder')} of DeepSpeed, once for this Python")
        with build_lock(folder, extension.name):
            extension.load(verbose=False)
    except Exception as error:
        print(f"deepspeed: {builder}: {error}", file=sys.stderr)
        first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        return f"the build of {builder} failed ({first_line[:REASON_CHARACTERS]}; more in output.log)"
    return None


@contextmanager
def build_lock(folder: Path, extension: str) -> Iterator[None]:
    """Wait for any running build in TORCH_EXTENSIONS_DIR, a folder of ours alone, and lock it for `extension`.

    A lock file of torch's that is there now was left by a killed build, and torch would wait for it for ever.
    """
    make_private(folder)
    with (folder / "builder.flock").open("w") as lock:
        wait_for_lock(lock.fileno(), fcntl.LOCK_EX)
        (folder / extension / "lock").unlink(missing_ok=True)
        yield
