"""An export as its form writes it: the text, its file, and the sentences of the comments at its head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trainfast_runner.machine.devices import DEVICE_ORDER, PCI_ORDER, VISIBLE_DEVICES
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.worker.catalog import ALLOCATOR_VARIABLES
from trainfast_runner.worker.shared.memory_limit import ORDINARY_VARIABLES

TORCHRUN_PORT = 29500
"""torchrun's own default for an endpoint without a port."""
SAME_RUN_HERE = "--to command, which starts the same run here"
"""The advice where a form cannot express a run."""


@dataclass(frozen=True)
class ExportText:
    """The text of a form."""

    text: str
    left_out: list[str]
    """Knobs not at their defaults that the form cannot express."""
    file: str
    """The name under which `-o` writes the text."""
    other_files: dict[str, str] = field(default_factory=dict)
    """Further texts that `-o` writes, by file name."""


def torchrun_words(run: RunFile) -> list[str]:
    """The words that start a script with the run's ranks; of a run on several nodes those for each node."""
    if not run.nodes:
        return ["torchrun", "--standalone", "--nproc-per-node", str(run.world_size)]
    count, ranks = str(len(run.nodes)), str(run.nodes[0].world_size)
    endpoint = f"{first_host(run)}:{TORCHRUN_PORT}"
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", run.run_id]
    return ["torchrun", "--nnodes", count, "--nproc-per-node", ranks, *meeting]


def torchrun_comments(subject: str, run: RunFile) -> list[str]:
    """A comment with the command that starts a script with the run's ranks; none for one rank."""
    on_each = " on each node" if run.nodes else ""
    return [f"{subject}{on_each}: {' '.join(torchrun_words(run))} SCRIPT"] if run.world_size > 1 else []


def first_host(run: RunFile) -> str:
    """The name by which the others reach node 0; a placeholder where Slurm picks it."""
    host = run.nodes[0].host
    return {"local": "localhost", "": "HOST_OF_NODE_0"}.get(host, host)


def hosts_words(run: RunFile) -> list[str]:
    """The options of `run` that place the nodes, of sbatch only their count; empty for a run on one machine."""
    if run.by_slurm:
        return [f"--slurm=--nodes={len(run.nodes)}"]
    return ["--hosts", ",".join(node.host for node in run.nodes)] if run.nodes else []


def file_comment(run: RunFile, file: str, form: str) -> str:
    """The comment with the command that writes `file` beside the text of a form."""
    return f"{file}: trainfast-tui export {run.run_id} --to {form} -o DIR"


def gpu_variables(run: RunFile) -> dict[str, str]:
    """The variables by which a command sees the run's GPUs: by index if the run did, with the order that counts."""
    visible = run.env.get(VISIBLE_DEVICES, ",".join(run.device_uuids))
    order = {DEVICE_ORDER: PCI_ORDER} if visible[:1].isdecimal() else {}
    return {**order, VISIBLE_DEVICES: visible}


def memory_variables(run: RunFile) -> dict[str, str]:
    """The variables by which a script frees and takes memory as the timed steps of the run did; else empty."""
    if run.device != "cpu":
        return {name: run.env[name] for name in ALLOCATOR_VARIABLES if name in run.env}
    is_default = run.script is None and run.knobs.get("memory_limit") is None
    return dict(ORDINARY_VARIABLES) if is_default else {}


def memory_comments(run: RunFile) -> list[str]:
    """Comments of a form that cannot hold variables."""
    variables = " ".join(f"{name}={value}" for name, value in memory_variables(run).items())
    as_run = "as fast on a CPU as the run" if run.device == "cpu" else "memory as in the run"
    return [f"In front of the command, {as_run}: {variables}"] if variables else []


def head_comments(run: RunFile, packages: Sequence[str], left_out: Sequence[str]) -> list[str]:
    """Comments: the run, the versions of these packages that it ran with, and the settings left out."""
    versions = ", ".join(f"{name} {version}" for name in packages if (version := run.versions.get(name)))
    sentences = [f"The settings of {run.run_id} ({run.preset}){f', with {versions}' if versions else ''}."]
    return [*sentences, f"Cannot be expressed in this format: {', '.join(left_out)}."] if left_out else sentences
