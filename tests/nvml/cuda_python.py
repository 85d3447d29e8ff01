"""A stand-in for a training Python whose torch is a CUDA build."""

import sys

VERSIONS = {"torch": "2.13.0", "transformers": "5.0.0", "tokenizers": "0.22.0", "torch.version.cuda": "13.0"}
ANSWERS = """#!{python}
import json, socket, sys
questions = socket.socket(fileno=json.loads(sys.argv[-1])["questions"])
for line in questions.makefile():
    questions.sendall(json.dumps({{**json.loads(line), **{answer}}}).encode() + b"\\n")
"""


def cuda_python(folder, versions=None):
    """Write `folder/python`, which answers inspections; `versions` replace its own."""
    has = {**VERSIONS, **(versions or {})}
    answer = {"request": 0, "python": "3.12.0", "versions": has, "config": {}}
    folder.mkdir(exist_ok=True)
    file = folder / "python"
    file.write_text(ANSWERS.format(python=sys.executable, answer=answer))
    file.chmod(0o755)
    return str(file)
