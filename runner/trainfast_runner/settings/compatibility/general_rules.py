"""Rules for every run: its steps, devices, precision, limits and the shapes of its model."""

from __future__ import annotations

from trainfast_runner.errors import UserError
from trainfast_runner.machine.devices_knob import asks_for_cpu, count_asked
from trainfast_runner.settings.compatibility.facts import Facts, Rule
from trainfast_runner.settings.config_fields import first_size
from trainfast_runner.settings.device_counts import chosen_gpus, devices_asked
from trainfast_runner.settings.knob_values import MAX_CPU_PROCESSES, parse_bytes_per_rank
from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_runner.settings.precisions import PRECISIONS
from trainfast_runner.worker.catalog import nearest_strategy
from trainfast_runner.worker.shared.recipes import SMALLEST_VOCAB
from trainfast_runner.worker.shared.sequence_lengths import longest_seq_len, positions_needed


def _warmup_leaves_steps(facts: Facts) -> None:
    steps, warmup = facts.knobs["steps"], facts.knobs["timing_warmup"]
    if isinstance(steps, int) and isinstance(warmup, int) and warmup >= steps:
        raise UserError(
            f"timing_warmup={warmup} leaves no step of steps={steps} to measure",
            key="timing_warmup",
            advice=f"timing_warmup={max(0, min(3, steps - 1))}",
        )


def devices_exist(facts: Facts) -> None:
    """Refuse devices that do not exist, to train on or to watch."""
    devices = devices_asked(facts.knobs)
    machine = facts.machine
    if machine.refusal is not None:
        raise machine.refusal
    chosen = chosen_gpus(facts.knobs, machine).gpus
    machine.watched(facts.knobs["watch"], chosen)
    if machine.device == "cuda":
        return
    if isinstance(devices, str) and not asks_for_cpu(devices):
        raise UserError(
            f"devices={devices} names GPUs and a run here has none ({machine.no_gpu_reason});"
            " without a GPU devices is a count of processes",
            key="devices",
            allowed=[f"1 to {MAX_CPU_PROCESSES}"],
        )
    count = _cpu_processes(facts)
    if count > MAX_CPU_PROCESSES:
        raise UserError(
            f"devices={count}: at most {MAX_CPU_PROCESSES} processes on a CPU",
            key="devices",
            allowed=[f"1 to {MAX_CPU_PROCESSES}"],
            advice=f"devices={MAX_CPU_PROCESSES}",
        )


def _cpu_processes(facts: Facts) -> int:
    """Return the number of processes asked for on the CPU."""
    count = count_asked(devices_asked(facts.knobs))
    return facts.rank_count if count is None else count


def strategy_uses_all_devices(facts: Facts) -> None:
    """Refuse several devices for a strategy that uses one."""
    if not facts.strategy.one_device:
        return
    on_gpus = facts.machine.device == "cuda"
    count = len(chosen_gpus(facts.knobs, facts.machine).gpus) if on_gpus else _cpu_processes(facts)
    if count > 1:
        devices = devices_asked(facts.knobs)
        several = nearest_strategy(facts.strategy, lambda strategy: not strategy.one_device)
        raise UserError(
            f"strategy={facts.strategy.name} trains on one device and devices={devices} asks for {count}",
            key="strategy",
            advice=f"strategy={several} with devices={devices}, or devices=1",
        )


def precision_has_hardware(facts: Facts) -> None:
    """Refuse tf32 on a CPU, and tf32, bf16 and bf16-pure on a GPU before Ampere."""
    precision = str(facts.knobs["precision"])
    if precision == "tf32" and facts.machine.device == "cpu":
        raise UserError(
            "precision=tf32 is a format of NVIDIA tensor cores and this run is on the CPU",
            key="precision",
            advice="precision=fp32 or precision=bf16",
        )
    entry = PRECISIONS[precision]
    if facts.machine.device == "cpu" or entry.min_compute_capability == (0, 0):
        return
    for gpu in chosen_gpus(facts.knobs, facts.machine).gpus:
        if not entry.runs_on(gpu.compute_capability):
            raise UserError(
                f"precision={precision} needs compute capability {'.'.join(map(str, entry.min_compute_capability))}"
                f" or later and GPU {gpu.index}, {gpu.name or 'name unknown'}, has {gpu.compute_capability}",
                key="precision",
                advice="precision=fp16",
            )


def limit_for_every_rank(facts: Facts) -> None:
    """Refuse a list of limits without exactly one for each rank."""
    limit = facts.knobs["memory_limit"]
    if not isinstance(limit, str):
        return
    figures, ranks = len(parse_bytes_per_rank(limit)), facts.rank_count
    if figures not in (1, ranks):
        raise UserError(
            f"memory_limit={limit} names {figures} ranks and the run has {ranks}",
            key="memory_limit",
            allowed=["one value"] if ranks == 1 else ["one value", f"{ranks} values joined by +"],
        )


def overrides_take_effect(facts: Facts) -> None:
    """Refuse an override that has no effect with this strategy."""
    strategy = facts.knobs["strategy"]
    for name in facts.spec.overrides:
        entry = KNOBS_BY_NAME.get(name)
        if entry is not None and not entry.applies(facts.knobs):
            raise UserError(
                f"{name} does nothing with strategy={strategy}; it belongs to strategy {' or '.join(entry.only_with)}",
                key=name,
                advice=f"leaving {name} out",
            )


def _positions_suffice(facts: Facts) -> None:
    """Refuse a `seq_len` beyond the model's positions; the worker would refuse it too."""
    config, seq_len, objective = facts.config, facts.knobs["seq_len"], facts.spec.data["objective"]
    if objective == "image-classification" or "relative_attention_num_buckets" in config:
        # T5's positions are relative: its `n_positions` is without effect.
        return
    nested = config.get("text_config")
    if isinstance(nested, dict):
        config = {**config, **nested}
    field, positions = first_size(config, "n_positions", "max_position_embeddings")
    if positions and isinstance(seq_len, int) and (needed := positions_needed(objective, seq_len)) > positions:
        raise UserError(
            f"seq_len={seq_len} is longer than the model's model.{field}={positions}",
            key="seq_len",
            advice=f"seq_len={longest_seq_len(objective, positions)}, or model.{field}={needed}",
        )


def _vocabulary_holds_bytes(facts: Facts) -> None:
    """Refuse a family's vocabulary too small for a tokenizer trained on the text, which starts from every byte."""
    vocab, data = facts.config.get("vocab_size"), facts.spec.data
    trained = data.get("kind") not in ("random", "jpeg") and not data.get("tokenizer") and "family" in facts.spec.model
    if trained and isinstance(vocab, int) and vocab < SMALLEST_VOCAB:
        raise UserError(
            f"model.vocab_size={vocab} is too small: a byte-level BPE needs at least {SMALLEST_VOCAB}",
            key="model.vocab_size",
            allowed=[f"{SMALLEST_VOCAB} or more"],
            advice=f"model.vocab_size={SMALLEST_VOCAB}, or data.kind=random",
        )


def _heads_divide(facts: Facts) -> None:
    _, width = first_size(facts.config, "hidden_size", "n_embd")
    field, heads = first_size(facts.config, "num_attention_heads", "n_head")
    if width and heads and not facts.config.get("head_dim") and width % heads:
        divisors = [count for count in range(1, width + 1) if width % count == 0]
        raise UserError(
            f"the hidden size {width} is not divisible by model.{field}={heads}",
            key=f"model.{field}",
            advice=f"model.{field}={min(divisors, key=lambda count: abs(count - heads))}",
        )


GENERAL_RULES: tuple[Rule, ...] = (
    _warmup_leaves_steps,
    overrides_take_effect,
    devices_exist,
    strategy_uses_all_devices,
    precision_has_hardware,
    limit_for_every_rank,
    _positions_suffice,
    _vocabulary_holds_bytes,
    _heads_divide,
)
