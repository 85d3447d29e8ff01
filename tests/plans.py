"""A plan of a CPU run that nothing was looked up for."""

from trainfast_runner.running.planning import RunPlan
from trainfast_runner.settings.spec import resolve

PLAN = RunPlan(
    spec=resolve("tiny-llama"), device="cpu", world_size=1, gpus=(), watched=(), memory_limit_bytes=None,
    python="python", versions={}, env={},
)  # fmt: skip
