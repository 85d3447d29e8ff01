"""The module `pynvml`: nvidia-ml-py's, or something else of that name which may lack anything."""

from __future__ import annotations

import importlib
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final

NO_BINDING: Final = "the pynvml module cannot be imported: pip install nvidia-ml-py"
CURE: Final = "pip uninstall pynvml nvidia-ml-py3, then pip install --force-reinstall nvidia-ml-py"
IN_SHORT: Final = "pynvml is not nvidia-ml-py's: pip install --force-reinstall nvidia-ml-py"
"""What there is room for on a screen when it is a foreign one that shows GPUs all the same."""
NEEDED: Final = (
    *("NVMLError", "nvmlInit", "nvmlShutdown", "nvmlSystemGetDriverVersion", "nvmlDeviceGetCount"),
    *("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetName", "nvmlDeviceGetUUID"),
)
"""Without these there is no GPU to see; all else may be missing, reading by reading."""


@dataclass(frozen=True)
class Binding:
    """What `import pynvml` gave. `module` is None where no GPU can be seen through it, and `failure` then says why.

    `warning` is a sentence with the cure when the module is not nvidia-ml-py's.
    """

    module: ModuleType | None = None
    failure: str | None = None
    warning: str | None = None


def load() -> Binding:
    """Import it. Whatever a foreign module of that name raises, nothing is raised here."""
    try:
        module = importlib.import_module("pynvml")
    except ImportError:
        return Binding(failure=NO_BINDING)
    except Exception as error:
        return Binding(failure=f"the pynvml module cannot be imported ({type(error).__name__}). Cure: {CURE}")
    return judged(module)


def judged(module: ModuleType) -> Binding:
    """Whether a module of that name is nvidia-ml-py's, and of any use."""
    warning = foreign(module)
    error = getattr(module, "NVMLError", None)
    is_error = isinstance(error, type) and issubclass(error, Exception)
    if is_error and all(hasattr(module, name) for name in NEEDED):
        return Binding(module, warning=warning)
    where = getattr(module, "__file__", None) or "memory"
    failure = f"the pynvml module in {where} is not nvidia-ml-py's, and no GPU can be seen through it. Cure: {CURE}"
    return Binding(failure=failure, warning=warning)


def foreign(module: ModuleType) -> str | None:
    """A sentence when the imported `pynvml` is not nvidia-ml-py's, None when it is.

    The distributions `nvidia-ml-py3` and `pynvml` before 12 install a module of the same name, made for the
    drivers of their day.
    """
    where = getattr(module, "__file__", None)
    sentence = (
        f"the pynvml module in {where or 'memory'} is not nvidia-ml-py's: some readings will be missing. Cure: {CURE}"
    )
    try:
        official = importlib.metadata.distribution("nvidia-ml-py")
    except importlib.metadata.PackageNotFoundError:
        return sentence
    if where is None or not hasattr(module, "nvmlMemory_v2"):
        return sentence
    expected = Path(str(official.locate_file("pynvml.py")))
    return None if expected.exists() and expected.samefile(where) else sentence
