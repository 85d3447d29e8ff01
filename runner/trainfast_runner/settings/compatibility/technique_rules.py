"""Needs of a compiled module and of an attention kernel."""

from __future__ import annotations

import os
import shutil

from trainfast_runner.errors import UserError
from trainfast_runner.machine.extensions import search_path
from trainfast_runner.settings.compatibility.facts import Facts, Rule
from trainfast_runner.settings.precisions import PRECISIONS

COMPILER_OF_DEVICE = {"cpu": ("CXX", ("g++",), "g++"), "cuda": ("CC", ("gcc", "cc", "clang"), "gcc")}
"""The variable that names the compiler, its usual names, and its Debian package, by device."""


def _compile_has_a_compiler(facts: Facts) -> None:
    compile_mode = facts.knobs["compile"]
    if compile_mode == "off":
        return
    variable, names, package = COMPILER_OF_DEVICE[facts.machine.device]
    chosen = os.environ.get(variable)
    path = search_path(facts.python)
    if any(shutil.which(name, path=path) for name in ((chosen,) if chosen else names)):
        return
    raise UserError(
        f"compile={compile_mode} needs a compiler, and PATH has no {chosen or ' or '.join(names)}; install with:"
        f" apt-get install {package}",
        key="compile",
        advice="compile=off",
    )


def flash_has_a_gpu(facts: Facts) -> None:
    """Refuse `attention=flash` on a CPU."""
    if facts.knobs["attention"] == "flash" and facts.machine.device == "cpu":
        raise UserError(
            "attention=flash is a GPU kernel and this run is on the CPU", key="attention", advice="attention=sdpa"
        )


def _flash_can_run(facts: Facts) -> None:
    precision = str(facts.knobs["precision"])
    if facts.knobs["attention"] != "flash":
        return
    if not facts.versions.get("flash-attn"):
        raise UserError(
            f"attention=flash needs flash-attn; install with: {facts.python} -m pip install flash-attn"
            " --no-build-isolation",
            key="attention",
            advice="attention=sdpa, whose own flash kernel needs no package",
        )
    if not PRECISIONS[precision].computes_in_half:
        raise UserError(
            f"attention=flash has no kernel for precision={precision}",
            key="attention",
            advice=f"attention=sdpa, or attention=flash with precision={'bf16' if precision == 'tf32' else 'fp16'}",
        )


def _model_has_the_attention(facts: Facts) -> None:
    attention = str(facts.knobs["attention"])
    if facts.attentions is not None and attention not in facts.attentions:
        kernel = "sdpa" if "sdpa" in facts.attentions else "eager"
        raise UserError(
            f"{facts.config.get('model_type', 'this model')} has no attention={attention}",
            key="attention",
            allowed=facts.attentions,
            advice=f"attention=auto, which takes {kernel}",
        )


TECHNIQUE_RULES: tuple[Rule, ...] = (
    _compile_has_a_compiler,
    flash_has_a_gpu,
    _flash_can_run,
    _model_has_the_attention,
)
