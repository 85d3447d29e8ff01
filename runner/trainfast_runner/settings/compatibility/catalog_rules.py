"""Needs of strategies, optimizers and engines: each other, devices and installed packages."""

from __future__ import annotations

from trainfast_runner.errors import UserError
from trainfast_runner.machine.devices_knob import CPU, asks_for_cpu, cpu_processes
from trainfast_runner.settings.compatibility.facts import Facts, Rule
from trainfast_runner.settings.knob_type import whole_number
from trainfast_runner.worker.catalog import OPTIMIZERS, nearest_optimizer, nearest_strategy


def strategy_has_gpus(facts: Facts) -> None:
    """Refuse a strategy of one process over several devices where fewer than two GPUs are used."""
    entry, asked_devices = facts.strategy, facts.knobs["devices"]
    if entry.needs_gpus_reason is None:
        return
    requirement = f"strategy={entry.name} {entry.needs_gpus_reason}"
    if asks_for_cpu(asked_devices):
        on_cpu = asked_devices if (cpu_processes(asked_devices) or 0) > 1 else f"{CPU}:2"
        raise UserError(
            f"{requirement}, and devices={asked_devices} asks for the CPU",
            key="strategy",
            advice=f"strategy={entry.fallback} with devices={on_cpu}",
        )
    if facts.machine.device != "cuda":
        raise UserError(
            f"{requirement}, and a run here has none ({facts.machine.no_gpu_reason})",
            key="strategy",
            advice=f"strategy={entry.fallback}",
        )
    if facts.device_count < 2:
        raise UserError(
            f"{requirement}, and devices={asked_devices or 'auto'} is one",
            key="devices",
            advice="devices=2 where there are two, or strategy=single",
        )


def devices_fill_the_mesh(facts: Facts) -> None:
    """Refuse a number of devices that does not hold whole copies of the model."""
    entry = facts.strategy
    axis = entry.model_axis
    if axis is None:
        return
    degree = whole_number(facts.knobs, f"{axis}_degree")
    device_count = facts.device_count
    requirement = f"strategy={entry.name} with {axis}_degree={degree}"
    if "dp" not in entry.axes and device_count != degree:
        raise UserError(
            f"{requirement} runs on {degree} devices, not on devices={device_count}",
            key="devices",
            advice=f"devices={degree}" + (f", or {axis}_degree={device_count}" if device_count > 1 else ""),
        )
    if "dp" in entry.axes and (device_count % degree or device_count == degree):
        raise UserError(
            f"{requirement} needs a multiple of {degree} devices, at least {2 * degree}; devices={device_count} is not",
            key="devices",
            advice=f"devices={2 * degree}, or strategy={axis} with devices={degree}",
        )


def optimizer_takes_the_parameters(facts: Facts) -> None:
    """Refuse an optimizer that cannot take the parameters as the strategy keeps them."""
    entry = facts.optimizer
    refusal = entry.refusal(facts.strategy)
    if refusal is not None:
        takes = nearest_strategy(facts.strategy, lambda strategy: entry.refusal(strategy) is None)
        raise UserError(
            f"optimizer={entry.name} {refusal}",
            key="optimizer",
            allowed=[name for name, optimizer in OPTIMIZERS.items() if optimizer.refusal(facts.strategy) is None],
            advice=f"optimizer={nearest_optimizer(entry, facts.strategy)},"
            f" or strategy={takes} with optimizer={entry.name}",
        )


def optimizer_has_gpus(facts: Facts) -> None:
    """Refuse an optimizer that needs a GPU on a CPU."""
    entry = facts.optimizer
    if entry.needs_gpus_reason and facts.machine.device == "cpu":
        raise UserError(
            f"optimizer={entry.name} {entry.needs_gpus_reason}, and this run is on the CPU",
            key="optimizer",
            advice=f"optimizer={entry.fallback}",
        )


def engine_runs_the_strategy(facts: Facts) -> None:
    """Refuse a strategy that the engine cannot run."""
    entry, strategy = facts.engine, facts.strategy
    if entry.runs(strategy.name):
        return
    runs = " and ".join(f"strategy={name}" for name in entry.strategies)
    raise UserError(
        f"engine={entry.name} runs {runs} here, not strategy={strategy.name}",
        key="engine",
        advice=f"engine={entry.fallback} with strategy={strategy.name}, or strategy={entry.strategies[-1]}",
    )


def compile_fits(facts: Facts) -> None:
    """Refuse `compile` for a strategy or an engine that does not compile its model."""
    mode = facts.knobs["compile"]
    engine = facts.engine
    strategy = facts.strategy
    if mode == "off":
        return
    if not strategy.compiles:
        works = nearest_strategy(strategy, lambda other: other.compiles)
        raise UserError(
            f"compile={mode} does not work with strategy={strategy.name}, which moves weights or activations between"
            " the layers of a forward",
            key="compile",
            advice=f"compile=off, or compile={mode} with strategy={works}",
        )
    if not engine.compiles:
        raise UserError(
            f"engine={engine.name} does not take compile={mode}",
            key="compile",
            advice=f"compile=off, or compile={mode} with engine={engine.fallback}",
        )


def _engine_has_fp16_on_a_cpu(facts: Facts) -> None:
    engine = facts.engine
    if facts.knobs["precision"] == "fp16" and facts.machine.device == "cpu" and not engine.fp16_on_cpu:
        raise UserError(
            f"engine={engine.name} with precision=fp16 on a CPU silently trains in fp32",
            key="precision",
            advice=f"precision=bf16, or engine={engine.fallback}",
        )


def _packages_are_installed(facts: Facts) -> None:
    strategy, optimizer, engine = facts.strategy, facts.optimizer, facts.engine
    for knob, name, package, instead in (
        ("optimizer", optimizer.name, optimizer.package, optimizer.fallback),
        (
            "strategy",
            strategy.name,
            strategy.package,
            nearest_strategy(strategy, lambda other: other.package != strategy.package),
        ),
        ("engine", engine.name, engine.package, engine.fallback),
    ):
        if package is not None and not facts.versions.get(package):
            raise UserError(
                f"{knob}={name} needs {package}; install with: {facts.python} -m pip install {package}",
                key=knob,
                advice=f"{knob}={instead}",
            )


def link_has_gpus(facts: Facts) -> None:
    """Refuse `p2p=off` on a CPU."""
    if facts.knobs["p2p"] == "off" and facts.machine.device == "cpu":
        raise UserError(
            "p2p=off closes the direct link between GPUs: it needs two GPUs, and this run is on the CPU",
            key="p2p",
            advice="p2p=on",
        )


def _link_is_of_nccl(facts: Facts) -> None:
    """Refuse `p2p=off`, a setting of NCCL, with a strategy that does not use NCCL.

    Of the strategies of one process only dp sums its gradients by NCCL (torch's nn/parallel/comm.py, reduce_add).
    """
    entry = facts.strategy
    if facts.knobs["p2p"] == "off" and entry.no_nccl_reason:
        raise UserError(
            f"p2p=off does nothing with strategy={entry.name}: it closes links to NCCL, and {entry.no_nccl_reason}",
            key="p2p",
            advice=f"p2p=on, or strategy={entry.fallback} with p2p=off",
        )


CATALOG_RULES: tuple[Rule, ...] = (
    strategy_has_gpus,
    optimizer_takes_the_parameters,
    optimizer_has_gpus,
    engine_runs_the_strategy,
    compile_fits,
    _engine_has_fp16_on_a_cpu,
    _packages_are_installed,
    link_has_gpus,
    _link_is_of_nccl,
    devices_fill_the_mesh,
)
