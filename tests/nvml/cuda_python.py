"""A stand-in for a training Python whose torch is a CUDA build."""

import json
import sys

VERSIONS = {"torch": "2.13.0", "transformers": "5.0.0", "tokenizers": "0.22.0", "torch.version.cuda": "13.0"}


def cuda_python(folder, versions=None):
    """Write `folder/python`, which answers an inspection or the question for its torch; `versions` replace its own."""
    has = {**VERSIONS, **(versions or {})}
    answers = [json.dumps({"python": "3.12.0", "versions": has, "config": {}}), json.dumps(has)]
    folder.mkdir(exist_ok=True)
    file = folder / "python"
    asks_for_torch = "any(word.endswith('torch_build.py') for word in sys.argv)"
    file.write_text(f"#!{sys.executable}\nimport sys\nprint({answers!r}[{asks_for_torch}])\n")
    file.chmod(0o755)
    return str(file)
