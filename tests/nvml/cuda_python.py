"""A stand-in for a training Python whose torch is a CUDA build."""

import json
import sys

VERSIONS = {"torch": "2.13.0", "transformers": "5.0.0", "tokenizers": "0.22.0", "torch.version.cuda": "13.0"}


def cuda_python(folder, versions=None):
    """Write `folder/python`, which answers an inspection; `versions` replace its own."""
    has = {**VERSIONS, **(versions or {})}
    answer = json.dumps({"python": "3.12.0", "versions": has, "config": {}})
    folder.mkdir(exist_ok=True)
    file = folder / "python"
    file.write_text(f"#!{sys.executable}\nprint({answer!r})\n")
    file.chmod(0o755)
    return str(file)
