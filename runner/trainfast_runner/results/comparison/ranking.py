"""Rules by which figures of two runs rank: a run that does other work is neither better nor worse for taking longer."""

from __future__ import annotations

from typing import Any

from trainfast_runner.machine.devices_knob import CPU, cpu_processes
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_lines import Actual

# Verdicts on a step whose work differs: it is neither better nor worse for taking longer.
DIFFERENT_BATCH = "not comparable: different batch"
DIFFERENT_DEVICES = "not comparable: different devices"
DIFFERENT_MODEL = "not comparable: different model"
DIFFERENT_SCRIPT = "not comparable: different scripts"
SCRIPT_AND_PRESET = "not comparable: a script and a preset"
DIFFERENT_SEQ_LEN = "not comparable: different seq_len"
"""The verdict on figures of samples and steps of different lengths; tokens/s still rank."""
DIFFERENT_SAMPLE_VERDICTS = (DIFFERENT_MODEL, DIFFERENT_SCRIPT, SCRIPT_AND_PRESET, DIFFERENT_SEQ_LEN)
"""Verdicts on runs whose samples are other work: throughput and energy a sample rank no more than a step."""
DIFFERENT_STEPS = "not comparable: different number of steps"
"""The verdict on the last losses of trainings of different length."""
STRICT_THRESHOLDS = "not comparable: strict malloc thresholds"
"""The verdict on every speed if one of the runs was measured under strict thresholds."""
BATCH_KNOBS = ("batch_size", "grad_accum", "seq_len")
DEVICE_KNOBS = ("strategy", "devices", "tp_degree", "pp_degree", "micro_batches")


def unlike_work_verdict(a: Result, b: Result) -> str | None:
    """Return the verdict on steps that do different work in the two runs; None if they do the same."""
    if (a.script is None) != (b.script is None):
        return SCRIPT_AND_PRESET
    if a.script is not None and b.script is not None and not a.script.is_of_one_script(b.script):
        return DIFFERENT_SCRIPT
    if section_overrides(a, "model.") != section_overrides(b, "model.") or _shapes_differ(a.actual, b.actual):
        return DIFFERENT_MODEL
    lengths = a.knobs.get("seq_len"), b.knobs.get("seq_len")
    if None not in lengths and lengths[0] != lengths[1]:
        return DIFFERENT_SEQ_LEN
    if any(a.knobs.get(name) != b.knobs.get(name) for name in BATCH_KNOBS):
        return DIFFERENT_BATCH
    worlds = a.actual.world_size, b.actual.world_size
    shared_out = None not in worlds and worlds[0] != worlds[1]
    knobs_a, knobs_b = run_knobs(a), run_knobs(b)
    differ = shared_out or any(knobs_a.get(name) != knobs_b.get(name) for name in DEVICE_KNOBS)
    return DIFFERENT_DEVICES if differ else None


def _shapes_differ(a: Actual, b: Actual) -> bool:
    """True if a size of the two models is known to differ, as between presets."""
    sizes = zip((a.layers, a.hidden_size, a.vocab_size), (b.layers, b.hidden_size, b.vocab_size), strict=True)
    return any(None not in pair and pair[0] != pair[1] for pair in sizes)


def run_knobs(result: Result) -> dict[str, Any]:
    """The knobs of a run; `devices=cpu:2` of a run on the CPU is its count, as on a machine without a GPU."""
    processes = cpu_processes(result.knobs.get("devices"))
    if processes is None or result.actual.device != CPU:
        return result.knobs
    return {**result.knobs, "devices": processes}


def speeds_rank(a: Result, b: Result) -> bool:
    """True if neither run was measured under strict malloc thresholds."""
    return a.measured_under is None and b.measured_under is None


def watched_differently(a: Result, b: Result) -> bool:
    """True if one run counts the energy of devices that the other did not watch."""
    devices = [{device.uuid for device in result.throttle.devices} for result in (a, b)]
    return a.knobs.get("watch") != b.knobs.get("watch") and devices[0] != devices[1]


def section_overrides(result: Result, section: str = "") -> dict[str, Any]:
    """Only the model and data overrides, by `model.FIELD` and `data.FIELD`."""
    return {name: value for name, value in result.overrides.items() if "." in name and name.startswith(section)}
