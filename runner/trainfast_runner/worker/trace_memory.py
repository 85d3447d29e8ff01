"""Takes a training step without memory for each request and answers, one JSON line each, what was alive in it when.

`PY trace_memory.py REQUEST...`, where a request is JSON with `model`, `objective`, `knobs`, `device`, `whole` to trace
every block, and `tp_degree` for a slice, which must be the only request: it takes the process group. The real worker
builds the model and the optimizer and takes the step; only its tensors are fake. Of a stack of blocks that are all
alike three are traced: the first, one that stands for all between, and the last.
"""

from __future__ import annotations

import importlib
import json
import logging
import runpy
import sys
from pathlib import Path
from typing import Any


def main(request: str) -> dict[str, Any]:
    """What `step_course.course` found, `{"error": {...}}` for what cannot be built, `{"untraceable": reason}`."""
    from .invalid import InvalidInput

    logging.disable(logging.WARNING)
    try:
        from .step_course import course

        return course(json.loads(request))
    except InvalidInput as error:
        return {"error": error.as_fields()}
    except Exception as error:
        return {"untraceable": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("bootstrap.py")))
    trace = importlib.import_module("trainfast_worker.trace_memory").main
    for argument in sys.argv[1:]:
        print(json.dumps(trace(argument)), flush=True)
