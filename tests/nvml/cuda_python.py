"""A stand-in for a training Python whose torch is a CUDA build."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

VERSIONS = {"torch": "2.13.0", "transformers": "5.0.0", "tokenizers": "0.22.0", "torch.version.cuda": "13.0"}


def cuda_python(folder: Path, versions: Mapping[str, str | None] | None = None) -> str:
    """Write `folder/python`, which answers an inspection and nothing else; `versions` replace its own."""
    answer = {"python": "3.12.0", "versions": {**VERSIONS, **(versions or {})}, "config": {}}
    folder.mkdir(exist_ok=True)
    file = folder / "python"
    file.write_text(f"#!{sys.executable}\nprint({json.dumps(json.dumps(answer))})\n")
    file.chmod(0o755)
    return str(file)
