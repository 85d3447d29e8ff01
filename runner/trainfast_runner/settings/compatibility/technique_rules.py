"""What an engine, a compiled module, a kernel or an optimizer needs of the other knobs and the machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

from trainfast_runner.errors import UserError
from trainfast_runner.settings.compatibility.facts import Facts

ENGINE_STRATEGIES = ("single", "ddp")
"""What Accelerate and the Trainer are driven with. Asked for FSDP on a CPU, both train DDP without a word."""
COMPILE_STRATEGIES = ("single", "ddp")
COMPILERS = {"cpu": ("CXX", ("g++",), "g++"), "cuda": ("CC", ("gcc", "cc", "clang"), "gcc")}
"""By device: the variable that names the compiler, the names it is looked for under, and the Debian package."""


def engine_runs_the_strategy(facts: Facts) -> UserError | None:
    """An engine other than ours drives only some strategies."""
    engine, strategy = facts.knobs["engine"], facts.knobs["strategy"]
    if engine == "native" or strategy in ENGINE_STRATEGIES:
        return None
    return UserError(
        f"engine={engine} runs strategy=single and strategy=ddp here, not strategy={strategy}",
        key="engine",
        advice=f"engine=native with strategy={strategy}, or strategy=ddp",
    )


def _engine_is_installed(facts: Facts) -> UserError | None:
    engine = facts.knobs["engine"]
    if engine == "native" or facts.versions.get("accelerate"):
        return None
    return UserError(
        f"engine={engine} needs accelerate; install with: {facts.python} -m pip install accelerate",
        key="engine",
        advice="engine=native",
    )


def _engine_casts(facts: Facts) -> UserError | None:
    engine, precision = facts.knobs["engine"], facts.knobs["precision"]
    if engine == "native" or precision != "fp16" or facts.machine.device != "cpu":
        return None
    return UserError(
        f"engine={engine} with precision=fp16 on a CPU trains in fp32 without a word",
        key="precision",
        advice="precision=bf16, or engine=native",
    )


def compile_fits(facts: Facts) -> UserError | None:
    """The other engines compile each in a way of their own; here they are to be compared with the loop, uncompiled."""
    asked, engine, strategy = facts.knobs["compile"], facts.knobs["engine"], facts.knobs["strategy"]
    if asked == "off":
        return None
    if strategy not in COMPILE_STRATEGIES:
        return UserError(
            f"compile={asked} does not work with strategy={strategy}, which moves weights or activations between"
            " the layers of a forward",
            key="compile",
            advice=f"compile=off, or compile={asked} with strategy=ddp",
        )
    if engine != "native":
        return UserError(
            f"compile={asked} is not handed to engine={engine}",
            key="compile",
            advice=f"compile=off, or compile={asked} with engine=native",
        )
    return None


def _compile_has_a_compiler(facts: Facts) -> UserError | None:
    asked = facts.knobs["compile"]
    if asked == "off":
        return None
    variable, names, package = COMPILERS[facts.machine.device]
    wanted = os.environ.get(variable)
    path = os.pathsep.join([os.path.dirname(facts.python), os.environ.get("PATH", os.defpath)])
    if any(shutil.which(name, path=path) for name in ((wanted,) if wanted else names)):
        return None
    return UserError(
        f"compile={asked} needs a compiler, and PATH has no {wanted or ' or '.join(names)}; install with:"
        f" apt install {package}",
        key="compile",
        advice="compile=off",
    )


def _flash_can_run(facts: Facts) -> UserError | None:
    precision = facts.knobs["precision"]
    if facts.knobs["attention"] != "flash":
        return None
    if facts.machine.device == "cpu":
        return UserError(
            "attention=flash is a GPU kernel and this run is on the CPU", key="attention", advice="attention=sdpa"
        )
    if not facts.versions.get("flash-attn"):
        return UserError(
            f"attention=flash needs flash-attn; install with: {facts.python} -m pip install flash-attn"
            " --no-build-isolation",
            key="attention",
            advice="attention=sdpa, whose own flash kernel needs no package",
        )
    if precision in ("fp32", "tf32"):
        return UserError(
            f"attention=flash has no kernel for precision={precision}",
            key="attention",
            advice=f"attention=sdpa, or attention=flash with precision={'bf16' if precision == 'tf32' else 'fp16'}",
        )
    return None


def _model_has_the_attention(facts: Facts) -> UserError | None:
    asked = str(facts.knobs["attention"])
    if facts.attentions is None or asked in facts.attentions:
        return None
    kernel = "sdpa" if "sdpa" in facts.attentions else "eager"
    return UserError(
        f"{facts.config.get('model_type', 'this model')} has no attention={asked}",
        key="attention",
        allowed=facts.attentions,
        advice=f"attention=auto, which takes {kernel}",
    )


def _pages_need_a_gpu(facts: Facts) -> UserError | None:
    if facts.knobs["optimizer"] != "paged-adamw-8bit" or facts.machine.device != "cpu":
        return None
    return UserError(
        "optimizer=paged-adamw-8bit pages its states between a GPU and the host, and this run is on the CPU, where"
        " they would stay in memory",
        key="optimizer",
        advice="optimizer=adamw-8bit",
    )


TECHNIQUE_RULES: tuple[Callable[[Facts], UserError | None], ...] = (
    engine_runs_the_strategy,
    _engine_is_installed,
    _engine_casts,
    compile_fits,
    _compile_has_a_compiler,
    _flash_can_run,
    _model_has_the_attention,
    _pages_need_a_gpu,
)
