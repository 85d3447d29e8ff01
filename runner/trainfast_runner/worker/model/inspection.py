"""The imports of the training stack, and the packages of a Python and facts of a model, answered by a standby's fork.

A configuration does not need torch: without it the answer takes a quarter of the time.
"""

import ast
import importlib.metadata
import importlib.util
import json
import logging
import platform
import runpy
import sys
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..invalid import InvalidInput

STACK = ("torch._dynamo", "transformers.modeling_utils", "transformers.generation.utils")
"""Imported before a fork and before the go: a thousand modules, which take as long as torch.

A run imports them too, before its memory is counted. bitsandbytes and DeepSpeed look for a GPU when they are imported:
they wait for the go.
"""
HIDDEN_PACKAGES = (
    *("accelerate", "deepspeed", "peft", "torchao", "kernels", "sklearn", "scipy", "torchvision"),
    *("tensorflow", "jax", "flax"),
)
"""Packages that transformers imports if installed, and that an answer does not use."""


def import_stack(models: Iterable[tuple[dict[str, Any], str]]) -> None:
    """Import torch, transformers and the code of these models with their objectives. Raises the error of an import."""
    for name in STACK:
        importlib.import_module(name)
    from .build import import_model_code
    from .model_config import resolve_config

    for model, objective in {json.dumps(one): one for one in models}.values():
        with suppress(Exception):  # building the model reports it
            import_model_code(resolve_config(model), objective)


def hide_packages(names: Collection[str]) -> None:
    """Hide installed packages from transformers, which imports those that `importlib.util.find_spec` finds."""
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name.partition(".")[0] in names else real(name, package)

    importlib.util.find_spec = find_spec


VERSIONED_PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "torchao", "numpy")
"""Packages whose versions are asked for, beside those of the catalog."""


def inspect(
    part: str, model: dict[str, Any] | None, objective: str, *, count: bool, attention: bool, lora_targets: str = ""
) -> dict[str, Any]:
    """Return `python`, `versions`, and for a model `config`, `model_type`, and as asked `parameters` and `attentions`.

    `error` is there if the model cannot be built, or has no layers of the names in `lora_targets`.
    """
    answer: dict[str, Any] = {"python": platform.python_version(), "versions": {**_versions(), **torch_build()}}
    answer["families"] = {"liger-kernel": liger_families()}
    if not model:
        return answer
    if answer["versions"]["transformers"] is None:
        answer["error"] = {"message": "this Python has no transformers", "key": "python", "allowed": []}
        return {**answer, "install": "pip install torch transformers tokenizers"}
    if "torch" not in sys.modules:
        hide_packages(("torch", "tensorflow", "jax"))
        logging.disable(logging.WARNING)
    from .model_config import check_family, resolve_config

    try:
        config = resolve_config(model)
        check_family(config, objective)
        answer["model_type"] = config.model_type
        # The plans belong to the class: a configuration does not store them.
        plans = {name: getattr(config, name, None) for name in ("base_model_tp_plan", "base_model_ep_plan")}
        answer["config"] = {**config.to_dict(), **plans}
        if count:
            answer["parameters"] = _count(config, objective)
        if attention:
            from .build import attentions

            answer["attentions"] = attentions(config, objective)
        if lora_targets:
            from .build import check_targets

            check_targets(config, objective, lora_targets)
    except InvalidInput as error:
        answer["error"] = error.as_fields()
    return answer


def _versions() -> dict[str, str | None]:
    from ..catalog import packages

    versions: dict[str, str | None] = {}
    for name in (*VERSIONED_PACKAGES, *packages()):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _count(config: Any, objective: str) -> int:
    import torch

    from .build import model_class

    with torch.device("meta"):
        model = model_class(objective).from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def liger_families() -> list[str]:
    """Model types in liger-kernel's table; empty without the package, or with another table.

    Its file is read and not imported: that would import triton, which needs a GPU's driver.
    """
    spec = importlib.util.find_spec("liger_kernel")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    file = Path(*folders[:1], "transformers", "monkey_patch.py")
    if not folders or not file.exists():
        return []
    _, _, after = file.read_text(encoding="utf-8").partition("\nMODEL_TYPE_TO_APPLY_LIGER_FN = ")
    with suppress(SyntaxError):
        table = ast.parse(after.partition("\n}")[0] + "\n}", mode="eval").body
        keys = table.keys if isinstance(table, ast.Dict) else []
        return [str(key.value) for key in keys if isinstance(key, ast.Constant)]
    return []


def torch_build() -> dict[str, str | None]:
    """CUDA and HIP (ROCm) versions of torch's build; None for a platform that it was not built for, and without torch.

    Only torch/version.py is run: importing torch takes seconds, and the distribution's version has no `+cpu` or
    `+cu130` in builds of PyPI, conda or one's own.
    """
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    versions = runpy.run_path(str(file)) if file is not None and file.exists() else {}
    return {f"torch.version.{name}": str(versions[name]) if versions.get(name) else None for name in ("cuda", "hip")}
