"""A memory model of alike blocks and a head, of which every byte is known."""

import msgspec

from trainfast_runner.memory.model import MemoryModel
from trainfast_runner.memory.timeline import BlockStack, Segment
from trainfast_runner.settings.knobs import defaults
from trainfast_runner.settings.spec import RunSpec

BLOCK, ROOT = 1000, 500
"""Elements of a block's parameters, and of those outside."""
KEPT_BY_BLOCK, PASSING = 70, 30
"""Activation bytes a sample that a block leaves behind, and what it holds besides while it computes."""
WORK = ((10.0, 0.0, 4.0 * BLOCK), (0.0, 6e6, 1e5))
"""Calls, FLOPs and moved bytes of a block's forward: fixed, and of a sample."""
HEAD = 400
"""Activation bytes a sample of the head."""


def vector(grads=0, activations=0, temporary=0):
    return (0.0, float(grads), 0.0, float(activations), float(temporary), 0.0, 0.0)


def model_of(layers):
    """A model of that many alike blocks as three of them would have been traced, in fp32 with AdamW."""
    kept = min(3, layers)

    def forward(micro, place):
        line = (vector(), vector(activations=KEPT_BY_BLOCK + PASSING))
        return Segment("forward", micro, place, [line], (vector(), vector(activations=KEPT_BY_BLOCK)), WORK)

    def backward(micro, place):
        grads = 4 * BLOCK if micro == 1 else 0
        delta = (vector(grads=grads), vector(activations=-KEPT_BY_BLOCK))
        return Segment("backward", micro, place, [(vector(temporary=4 * BLOCK), vector(temporary=PASSING))], delta)

    segments = [Segment("data", 0, "", [(vector(), vector(activations=16))], (vector(), vector(activations=16)))]
    for micro in (1, 2):
        segments += [forward(micro, f"0:{index}") for index in range(kept)]
        head = (vector(), vector(activations=HEAD))
        segments.append(Segment("forward", micro, "", [head], head))
        root_grads = 4 * ROOT if micro == 1 else 0
        delta = (vector(grads=root_grads), vector(activations=-HEAD))
        segments.append(Segment("backward", micro, "", [(vector(), vector(temporary=HEAD))], delta))
        segments += [backward(micro, f"0:{index}") for index in reversed(range(kept))]
    parameters = layers * BLOCK + ROOT
    return MemoryModel(
        device="cpu",
        parameter_sizes=[BLOCK] * layers + [ROOT],
        stacks=[BlockStack(kept, [BLOCK] * layers)],
        segments=segments,
        before_optimizer=[4.0 * parameters, 4.0 * parameters, 8.0 * parameters, *[0.0] * 4],
        optimizer_peak=[4.0 * parameters, 4.0 * parameters, 8.0 * parameters, 0.0, 4.0 * parameters, 0.0, 0.0],
        basis="three blocks",
    )


def spec_with(**knobs):
    return RunSpec("tiny", None, "", {"family": "llama"}, {"objective": "causal-lm"}, {**defaults(), **knobs})


class Tracer:
    """Stands in for the warm Python of traces: notes what it is asked, and answers of `model_of(12)`."""

    def __init__(self):
        self.asked = []
        self.refusal = {}

    def __call__(self, executable, requests, cancelled, environment):
        model = msgspec.to_builtins(model_of(12))
        for number, request in enumerate(requests):
            self.asked.append(request)
            names = ("before_optimizer", "optimizer_peak")
            if request["part"] == "step":
                names = ("parameter_sizes", "stacks", "segments", "pipeline")
            yield {"request": number, "unused": ["pooler"], **(self.refusal or {name: model[name] for name in names})}
