"""Gather a `Situation`: the model's shapes, the links between the GPUs, the measured runs."""

from __future__ import annotations

import itertools

from trainfast_runner.errors import UserError
from trainfast_runner.machine import training_python
from trainfast_runner.machine.devices import Machine
from trainfast_runner.machine.interconnect import read_links_among
from trainfast_runner.memory.model_size import model_size
from trainfast_runner.records.home import Home
from trainfast_runner.running.history import iter_rows
from trainfast_runner.search.advice.facts import EndedRun, Situation
from trainfast_runner.settings.spec import RunSpec

RUNS_READ_FOR_ADVICE = 300
"""Number of newest runs that are searched for runs of the same preset."""
SHAPE_FIELDS = ("hidden_size", "n_embd", "d_model", "intermediate_size", "n_inner", "d_ff", "vocab_size")
"""Fields of a configuration that are sides of a model's matrices."""


def gather(spec: RunSpec, machine: Machine, home: Home, python: str | None = None) -> Situation:
    """Return the situation of a run, about a second the first time for a model; unavailable facts stay unknown."""
    model_refusal = None
    try:
        config = training_python.inspect(python, spec.model, spec.data["objective"]).config
    except UserError as error:
        config = {}
        if error.key != "python":
            model_refusal = error.line()
    return Situation(
        size=model_size(config),
        shapes={name: config[name] for name in SHAPE_FIELDS if isinstance(config.get(name), int)},
        links=read_links_among({gpu.uuid for gpu in machine.gpus if gpu.uuid}),
        measured=_measured(spec, home),
        model_refusal=model_refusal,
    )


def _measured(spec: RunSpec, home: Home) -> tuple[EndedRun, ...]:
    """Return this home's ended runs of the same preset and variant with the same model and data, newest first."""
    sections = {"model": spec.model, "data": spec.data}
    fields = {key: sections[key.partition(".")[0]].get(key.partition(".")[2]) for key in spec.overrides if "." in key}
    try:
        rows = list(itertools.islice(iter_rows(home), RUNS_READ_FOR_ADVICE))
    except UserError:
        return ()
    return tuple(
        EndedRun(row.run_id, row.knobs, row.state, row.samples_per_s if row.measured_under is None else None)
        for row in rows
        if (row.preset, row.variant) == (spec.preset, spec.variant)
        and row.state in ("finished", "oom")
        and {key: value for key, value in row.overrides.items() if "." in key} == fields
    )
