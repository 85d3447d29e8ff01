"""Fields of other tools as knobs: TrainingArguments, accelerate's configuration, DeepSpeed's json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainfast_runner.errors import UserError
from trainfast_runner.settings.knob_type import KnobValues
from trainfast_runner.settings.knobs import KNOBS, knob
from trainfast_runner.worker.catalog import OPTIMIZERS, STRATEGIES

OPTIMIZER_BY_TRAINER_NAME = {entry.trainer_name: name for name, entry in OPTIMIZERS.items() if entry.trainer_name}
KNOB_BY_FIELD = {
    field: entry.name
    for entry in KNOBS
    if (field := entry.same_as.trainer_field) is not None and entry.name not in ("optimizer", "compile")
}
"""Knobs by the field of TrainingArguments that has their very value."""
ACCELERATE_TYPES: dict[str | bool, str] = {False: "single"} | {
    entry.accelerate_type: name for name, entry in STRATEGIES.items() if entry.accelerate_type and not entry.is_zero
}
"""Strategies by accelerate's distributed_type. YAML 1.1 reads a bare `NO` as false; DEEPSPEED is several of them."""
RENAMED_FIELDS = {
    "activation_checkpointing": "gradient_checkpointing",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "train_batch_size": "per_device_train_batch_size",
    "batch_size": "per_device_train_batch_size",
    "lr": "learning_rate",
}
"""Names of other versions of transformers, and those that scripts of Accelerate give their flags."""
IGNORED_KEYS = (
    *("output_dir", "compute_environment", "num_machines", "machine_rank", "main_training_function", "rdzv_backend"),
    *("same_network", "debug", "downcast_bf16", "enable_cpu_affinity", "tpu_env", "tpu_use_cluster", "tpu_use_sudo"),
    *("steps_per_print", "wall_clock_breakdown", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
)
"""Keys that change neither the training nor its speed."""
CHOSEN_BY_THE_STRATEGY = (
    *("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size", "sub_group_size"),
    *("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_param_persistence_threshold"),
    *("buffer_size", "pin_memory"),
)
"""Keys of DeepSpeed's ZeRO tables that a run sets from its model and its device, whatever the JSON says."""


@dataclass
class ForeignKnobs:
    """Gathers the knobs of another tool's settings, and the settings that were not understood, as text."""

    knobs: KnobValues
    not_understood: list[str]

    def take(self, name: str, value: object, text: str) -> None:
        """Set a knob; a value that it does not take is not understood."""
        try:
            self.knobs[name] = knob(name).read(value)
        except UserError as error:
            self.not_understood.append(f"{text}: {error.message}")

    def take_compile(self, mode: str, text: str) -> None:
        """Set the compile knob by torch's name of a mode."""
        self.take("compile", mode.removesuffix("-no-cudagraphs"), text)

    def add_not_understood(self, table: dict[str, Any], name: str, ignored: Sequence[str] = ()) -> None:
        """Add the settings left in the table of that name, except "auto", to those that were not understood."""
        self.not_understood += [
            f"{name}.{key}: {value}" for key, value in table.items() if key not in ignored and value != "auto"
        ]

    def section(self, table: dict[str, Any], name: str) -> dict[str, Any]:
        """Remove the table `name` and return it, empty without one; a value that is no table is not understood."""
        value = table.pop(name, None)
        if value is not None and not isinstance(value, dict):
            self.not_understood.append(f"{name}: {value}")
        return dict(value) if isinstance(value, dict) else {}


def from_trainer_fields(fields: dict[str, Any]) -> ForeignKnobs:
    """Knobs of the fields of a TrainingArguments call."""
    remaining = {RENAMED_FIELDS.get(name, name): value for name, value in fields.items() if name not in IGNORED_KEYS}
    foreign = ForeignKnobs({}, [])
    halves = {name: remaining.pop(name) for name in ("bf16", "fp16", "tf32") if name in remaining}
    if halves:
        foreign.knobs["precision"] = next((name for name, on in halves.items() if on), "fp32")
    if (mixed_precision := remaining.pop("mixed_precision", None)) is not None:
        foreign.take(
            "precision", "fp32" if mixed_precision == "no" else mixed_precision, f"mixed_precision={mixed_precision!r}"
        )
    if remaining.pop("use_cpu", False):
        foreign.knobs["devices"] = "cpu"
    torch_compile = remaining.pop("torch_compile", None)
    mode = remaining.pop("torch_compile_mode", None)
    if torch_compile is not None or mode is not None:
        # transformers compiles where a mode is given.
        foreign.take_compile(str(mode or "default") if torch_compile or mode else "off", f"torch_compile_mode={mode!r}")
    deepspeed = remaining.pop("deepspeed", None)
    if isinstance(deepspeed, dict):
        from_its_json = from_deepspeed(deepspeed)
        if "precision" in foreign.knobs and not deepspeed.keys() & {"bf16", "fp16"}:
            # The Trainer gives its own precision to a configuration that names none.
            del from_its_json.knobs["precision"]
        foreign.knobs.update(from_its_json.knobs)
        foreign.not_understood.extend(from_its_json.not_understood)
    elif deepspeed is not None:
        foreign.not_understood.append(f"deepspeed={deepspeed!r}: import that file")
    for name, value in remaining.items():
        if name == "optim" and isinstance(value, str) and value in OPTIMIZER_BY_TRAINER_NAME:
            foreign.knobs["optimizer"] = OPTIMIZER_BY_TRAINER_NAME[value]
        elif name == "gradient_checkpointing" and isinstance(value, bool):
            foreign.knobs["checkpointing"] = "full" if value else "off"
        elif name in KNOB_BY_FIELD:
            foreign.take(KNOB_BY_FIELD[name], value, f"{name}={value!r}")
        else:
            foreign.not_understood.append(f"{name}={value!r}")
    return foreign


def from_accelerate(table: dict[str, Any]) -> ForeignKnobs:
    """Knobs of a file for `accelerate launch --config_file`."""
    remaining = {name: value for name, value in table.items() if name not in IGNORED_KEYS}
    foreign = ForeignKnobs({}, [])
    mixed_precision = remaining.pop("mixed_precision", None)
    if mixed_precision is not None:
        # YAML 1.1 reads a bare `no` as false.
        foreign.take(
            "precision",
            "fp32" if mixed_precision in ("no", False) else mixed_precision,
            f"mixed_precision: {mixed_precision}",
        )
    distributed_type = remaining.pop("distributed_type", None)
    count = remaining.pop("num_processes", 1)
    if isinstance(distributed_type, str | bool) and distributed_type in ACCELERATE_TYPES:
        foreign.knobs["strategy"] = ACCELERATE_TYPES[distributed_type]
    elif distributed_type is not None:
        foreign.not_understood.append(f"distributed_type: {distributed_type}")
    if remaining.pop("use_cpu", False):
        foreign.knobs["devices"] = "cpu"
    elif type(count) is not int:
        foreign.not_understood.append(f"num_processes: {count}")
    elif count > 1:
        foreign.knobs["devices"] = count
    dynamo = remaining.pop("dynamo_config", None)
    if isinstance(dynamo, dict) and str(dynamo.get("dynamo_backend")).upper() == "INDUCTOR":
        mode = str(dynamo.get("dynamo_mode", "default"))
        foreign.take_compile(mode, f"dynamo_mode={mode!r}")
    elif dynamo is not None:
        foreign.not_understood.append(f"dynamo_config: {dynamo}")
    fsdp = foreign.section(remaining, "fsdp_config")
    for key, name in (("fsdp_reshard_after_forward", "reshard"), ("fsdp_activation_checkpointing", "checkpointing")):
        value = fsdp.pop(key, None)
        if isinstance(value, bool):
            foreign.knobs[name] = ("on" if value else "off") if name == "reshard" else ("full" if value else "off")
        elif value is not None:
            foreign.not_understood.append(f"{key}: {value}")
    fsdp.pop("fsdp_version", None)
    fsdp.pop("fsdp_auto_wrap_policy", None)
    foreign.not_understood.extend(f"{name}: {value}" for name, value in {**remaining, **fsdp}.items())
    return foreign


def from_deepspeed(config: dict[str, Any]) -> ForeignKnobs:
    """Knobs of DeepSpeed's json; "auto" is left to the Trainer."""
    remaining = {name: value for name, value in config.items() if name not in (*IGNORED_KEYS, "train_batch_size")}
    foreign = ForeignKnobs({}, [])
    _take_zero(foreign, foreign.section(remaining, "zero_optimization"))
    _take_halves(foreign, remaining)
    knob_by_key = {
        "train_micro_batch_size_per_gpu": "batch_size",
        "gradient_accumulation_steps": "grad_accum",
        "gradient_clipping": "grad_clip",
    }
    for key, value in remaining.items():
        if value == "auto":
            continue
        if key in knob_by_key:
            foreign.take(knob_by_key[key], value, f"{key}: {value}")
        else:
            foreign.not_understood.append(f"{key}: {value}")
    return foreign


def _take_zero(foreign: ForeignKnobs, zero: dict[str, Any]) -> None:
    """Set the knobs of `zero_optimization`."""
    tables = {name: foreign.section(zero, name) for name in ("offload_optimizer", "offload_param")}
    # DeepSpeed's default device is "none": such a table offloads nothing.
    offloading = {name: table for name, table in tables.items() if table.get("device", "none") != "none"}
    names = [
        name
        for name, entry in STRATEGIES.items()
        if entry.is_zero and entry.zero_stage == zero.get("stage") and entry.offloads == bool(offloading)
    ]
    if names:
        foreign.knobs["strategy"] = names[0]
    elif zero:
        foreign.not_understood.append(f"zero_optimization.stage: {zero.get('stage')}")
    zero.pop("stage", None)
    foreign.add_not_understood(zero, "zero_optimization", CHOSEN_BY_THE_STRATEGY)
    for name, table in offloading.items():
        device = table["device"]
        if device in ("cpu", "nvme"):
            del table["device"]
        path = foreign.knobs.get("offload_path")
        if device != "nvme" or path == table.get("nvme_path"):
            # DeepSpeed reads the path of a disk alone.
            table.pop("nvme_path", None)
        elif path is None:
            path = table.pop("nvme_path")
            foreign.take("offload_path", path, f"nvme_path: {path}")
        foreign.add_not_understood(table, f"zero_optimization.{name}", CHOSEN_BY_THE_STRATEGY)


def _take_halves(foreign: ForeignKnobs, remaining: dict[str, Any]) -> None:
    """Set the precision by the tables `bf16` and `fp16`, which leave `remaining`."""
    halves = {name: dict(remaining.pop(name)) for name in ("bf16", "fp16") if isinstance(remaining.get(name), dict)}
    enabled = {name: half.pop("enabled", False) for name, half in halves.items()}
    enabled_half = next((name for name, value in enabled.items() if value is True), None)
    if enabled_half is not None:
        is_pure = enabled_half == "bf16" and halves[enabled_half].pop("bf16_master_weights_and_grads", False)
        foreign.knobs["precision"] = "bf16-pure" if is_pure else enabled_half
        if is_pure:
            halves[enabled_half].pop("bf16_optimizer_states", None)
    elif "auto" not in enabled.values():
        foreign.knobs["precision"] = "fp32"
    for name, value in enabled.items():
        if not isinstance(value, bool) and value != "auto":
            foreign.not_understood.append(f"{name}.enabled: {value}")
        elif value:
            # A loss scale of 0 is DeepSpeed's default, a scale that follows the gradients.
            half = {key: setting for key, setting in halves[name].items() if (key, setting) != ("loss_scale", 0)}
            foreign.add_not_understood(half, name)
