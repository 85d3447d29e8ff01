"""The hosts of a run on several nodes: checked before anything starts, and given a supervisor each.

`python -P -m trainfast_runner.running.placing REQUEST` tells, on a host, what the launch must know of it; REQUEST has
the fields of `HostRequest` in JSON, the answer those of `HostFacts`.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.machine import warm_python
from trainfast_runner.machine.devices import Gpus, Machine, detect_machine
from trainfast_runner.machine.hosts import Host, host_argv, module_argv, ssh_failure
from trainfast_runner.machine.processes import boot_id
from trainfast_runner.records.home import Home
from trainfast_runner.records.json_lines import text_of, write_atomically
from trainfast_runner.records.run_directory import EVENTS_FILE, SUPERVISOR_LOG, node_file
from trainfast_runner.records.run_file import RunNode
from trainfast_runner.records.tick import DeviceReading
from trainfast_runner.running.nodes import KILL, LOOPBACK, ask_all_nodes, cannot_reach
from trainfast_runner.running.slurm import JOB_FILE, batch_script, node_count, submit
from trainfast_runner.settings.knob_values import KnobValue
from trainfast_runner.settings.spec import RunSpec
from trainfast_runner.units import CPU, asks_for_cpu, count_asked, counted

ANSWERS_WITHIN_S = 30.0
"""Chosen, not measured: time for a host to answer; a cold Python on a network disk takes tens of seconds."""
SKEW_S = 30.0
"""Clocks further apart are refused: records of two nodes are joined by wall clocks."""
PLACED_WITHIN_S = 30.0
PLACED_POLL_S = 0.02
"""Chosen, not measured: time for a supervisor to begin on another host, and the pause between two looks for it."""


class HostRequest(msgspec.Struct, frozen=True):
    """A question to a host: the versions of this training Python, and the content of this file of the home."""

    python: str
    nonce: str
    port: int | None = None
    """The port at which the launch listens, where node 0 is its machine."""


class HostFacts(msgspec.Struct, frozen=True):
    """The answer of a host; of a file that it cannot read an empty text."""

    host: str
    boot_id: str
    wall_ns: int
    nonce: str
    versions: dict[str, str | None]
    gpus: list[DeviceReading]
    address: str = ""
    """The host's address as ssh reached it; empty for the machine of the launch."""
    seen_address: str = ""
    """The address of the launch as the host sees it."""
    unreachable: str = ""
    """Address, port and reason where the launch could not be reached."""


@dataclass(frozen=True)
class Placement:
    """The nodes of a run, and their GPUs as those of one machine."""

    nodes: tuple[RunNode, ...]
    gpus: Gpus
    """The GPUs of all nodes, by node; empty on a CPU."""
    host: str
    """Node 0's own name."""
    boot_id: str
    """Node 0's."""
    slurm_options: tuple[str, ...] | None = None
    """Options of sbatch; None where ssh places the nodes."""

    def spec(self, spec: RunSpec, *, of_each: bool = False) -> RunSpec:
        """The run with the `devices` of all nodes, as checks and predictions need it.

        With `of_each` those of one node, as the run records it; of unequal nodes those of node 0.
        """
        count = sum(node.world_size for node in self.nodes[: 1 if of_each else None])
        return replace(spec, knobs={**spec.knobs, "devices": count if self.gpus else f"{CPU}:{count}"})

    def machine(self, machine: Machine) -> Machine:
        """The machine with the GPUs of all nodes in place of its own."""
        return replace(machine, gpus=self.gpus) if self.gpus else machine


def place(hosts: Sequence[Host], devices: KnobValue, python: str, home: Home) -> Placement:
    """Ask all hosts at once what the launch must know, and give each its ranks.

    `devices` counts per node; without it a node has its host's slots, else a rank a GPU, else one. Hosts named `local`
    share this machine's GPUs out. Raises UserError for the first host that cannot take part.
    """
    asked = _count_of_each(devices, "--hosts")
    facts = _ask_all(hosts, python, home)
    on_cpu = asks_for_cpu(devices) or not any(one.gpus for one in facts)
    local_count, taken_here, gpus, nodes = sum(host.is_local for host in hosts), 0, [], []
    for host, one in zip(hosts, facts, strict=True):
        available = len(one.gpus) // (local_count if host.is_local else 1)
        count = asked or host.slots or (1 if on_cpu else max(1, available))
        if not on_cpu and count > available:
            shared = f", shared by {local_count} local nodes" if host.is_local and local_count > 1 else ""
            raise _refusal(host, f"{counted(count, 'slot')}, but it has {counted(available, 'GPU')}{shared}")
        first = taken_here if host.is_local else 0
        chosen = [] if on_cpu else one.gpus[first : first + count]
        taken_here += len(chosen) if host.is_local else 0
        gpus += chosen
        # ssh does not show this machine its own address: another host saw it.
        seen = next((other.seen_address for other in facts if other.seen_address), LOOPBACK)
        uuids = [gpu.uuid for gpu in chosen if gpu.uuid]
        nodes.append(RunNode(host=host.name, world_size=count, address=one.address or seen, device_uuids=uuids))
    return Placement(tuple(nodes), tuple(gpus), facts[0].host, facts[0].boot_id)


def place_by_slurm(options: Sequence[str], devices: KnobValue, machine: Machine) -> Placement:
    """The nodes that these options of sbatch ask for, with `devices` ranks each, by default as many as GPUs, or one.

    The machine of the launch stands for them: Slurm starts a job when it likes, and what cannot run is refused now.
    Raises UserError.
    """
    on_cpu = asks_for_cpu(devices) or not machine.gpus
    count = _count_of_each(devices, "--slurm") or (1 if on_cpu else len(machine.gpus))
    if on_cpu and devices is not None and not asks_for_cpu(devices):
        raise UserError(
            f"devices={devices}: there is no GPU here by which a job on GPUs can be checked: {machine.no_gpu_reason}",
            key="devices",
            advice="start it on a machine like the nodes, or devices=cpu",
        )
    if not on_cpu and count > len(machine.gpus):
        message = f"devices={count}, but a machine like this one has {counted(len(machine.gpus), 'GPU')}"
        raise UserError(message, key="devices")
    nodes = (RunNode(host="", world_size=count),) * node_count(options)
    gpus = () if on_cpu else machine.gpus[:count] * len(nodes)
    return Placement(nodes, gpus, host="", boot_id="", slurm_options=tuple(options))


def _count_of_each(devices: KnobValue, option: str) -> int | None:
    """The devices of each node that the knob asks for; None for all. Raises UserError."""
    count = count_asked(devices) if asks_for_cpu(devices) else devices
    if count is not None and not isinstance(count, int):
        raise UserError(f"devices={devices} names GPUs: with {option} it counts those of each node", key="devices")
    return count


def _ask_all(hosts: Sequence[Host], python: str, home: Home) -> list[HostFacts]:
    """The answers of all hosts. Raises UserError for one that does not answer, or is unfit."""
    nonce_file, nonce = home.create().path / f".nonce-{secrets.token_hex(8)}", secrets.token_hex(16)
    nonce_file.write_text(nonce)
    here = host_facts(HostRequest(python, str(nonce_file)))
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        with (
            socket.create_server(("", 0), family=family, backlog=len(hosts), dualstack_ipv6=dual) as listener,
            ThreadPoolExecutor(len(hosts)) as pool,
        ):
            port = listener.getsockname()[1] if hosts[0].is_local else None
            request = HostRequest(python, str(nonce_file), port)
            answers = list(pool.map(lambda host: (here, 0.0) if host.is_local else _ask(host, request), hosts))
    finally:
        nonce_file.unlink(missing_ok=True)
    for host, (facts, skew_s) in zip(hosts, answers, strict=True):
        _refuse_unfit(host, facts, here, nonce, skew_s, home)
    return [facts for facts, _ in answers]


def host_facts(request: HostRequest) -> HostFacts:
    """The answer of this machine. Raises UserError where the training Python is none."""
    versions = warm_python.torch_build(request.python)
    connection = os.environ.get("SSH_CONNECTION", "").split()
    seen_address, unreachable = connection[0] if len(connection) == 4 else "", ""
    if request.port is not None and seen_address:
        unreachable = cannot_reach(seen_address, request.port)
    return HostFacts(
        host=socket.gethostname(),
        boot_id=boot_id(),
        wall_ns=time.time_ns(),
        nonce=text_of(Path(request.nonce)),
        versions=versions,
        gpus=list(detect_machine(versions).gpus),
        address=connection[2] if len(connection) == 4 else "",
        seen_address=seen_address,
        unreachable=unreachable,
    )


def _ask(host: Host, request: HostRequest) -> tuple[HostFacts, float]:
    """The host's answer, and the least seconds by which its clock is off from this machine's. Raises UserError."""
    asked_ns = time.time_ns()
    words = module_argv("trainfast_runner.running.placing", msgspec.json.encode(request).decode())
    try:
        done = subprocess.run(
            host_argv(host, words), stdin=subprocess.DEVNULL, capture_output=True, timeout=ANSWERS_WITHIN_S
        )
    except subprocess.TimeoutExpired:
        raise _refusal(host, f"did not answer within {ANSWERS_WITHIN_S:.0f} s") from None
    except OSError as error:
        raise _refusal(host, f"ssh cannot be started: {error.strerror}") from None
    answered_ns = time.time_ns()
    try:
        facts = msgspec.json.decode(done.stdout.strip().rpartition(b"\n")[2], type=HostFacts)
    except msgspec.DecodeError:
        reason = ssh_failure(host, done.returncode, done.stderr.decode(errors="replace"))
        raise UserError(reason, key="--hosts") from None
    return facts, max(0, asked_ns - facts.wall_ns, facts.wall_ns - answered_ns) / 1e9


def _refusal(host: Host, reason: str, advice: str | None = None) -> UserError:
    return UserError(f"host {host.name}: {reason}", key="--hosts", advice=advice)


def _refuse_unfit(host: Host, facts: HostFacts, here: HostFacts, nonce: str, skew_s: float, home: Home) -> None:
    """Raise UserError for a host with another torch, another home or another time."""
    torch, torch_here = facts.versions.get("torch"), here.versions.get("torch")
    if torch != torch_here:
        raise _refusal(host, f"torch {torch or 'is missing'} there, {torch_here} here: they cannot train together")
    if facts.nonce != nonce:
        raise _refusal(
            host,
            f"{home.path} is not the same folder there: a run on several hosts needs a shared home",
            "TRAINFAST_HOME in a folder that all hosts mount",
        )
    if skew_s > SKEW_S:
        raise _refusal(host, f"its clock is {skew_s:.0f} s off from this machine's", "NTP on both")
    if facts.unreachable:
        raise _refusal(host, f"it cannot reach {facts.unreachable}", "open all TCP ports between the hosts")


def start_nodes(directory: Path, placement: Placement) -> None:
    """Start the supervisor of each node; return once each has begun, or Slurm has queued them.

    Raises UserError where one does not; the run is then ended on all of them.
    """
    nodes = placement.nodes
    if placement.slurm_options is not None:
        words = module_argv("trainfast_runner.running.supervisor", "--node", "slurm", str(directory))
        try:
            job = submit(batch_script(len(nodes), words, directory), placement.slurm_options)
        except UserError:
            shutil.rmtree(directory, ignore_errors=True)  # there is no job, so there was no run
            raise
        write_atomically(directory / JOB_FILE, job.encode())
        return
    with ThreadPoolExecutor(len(nodes)) as pool:
        try:
            list(pool.map(lambda number: _start_node(directory, number, nodes[number]), range(len(nodes))))
        except UserError:
            ask_all_nodes(directory, KILL)
            raise


def _start_node(directory: Path, number: int, node: RunNode) -> None:
    host = Host(node.host, None)
    words = module_argv("trainfast_runner.running.supervisor", "--node", str(number), str(directory))
    done = subprocess.run(host_argv(host, words), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    events = node_file(directory, EVENTS_FILE, number)
    deadline_s = time.monotonic() + PLACED_WITHIN_S
    while not (events.exists() and events.stat().st_size):
        if done.returncode or time.monotonic() > deadline_s:
            log = node_file(directory, SUPERVISOR_LOG, number)
            reason = ssh_failure(host, done.returncode, done.stderr) if done.returncode else f"see {log}"
            raise UserError(f"host {host.name}: its supervisor did not start: {reason}", key="--hosts", exit_code=4)
        time.sleep(PLACED_POLL_S)


def main(request: str) -> int:
    """Print this host's facts; 1 with the reason on standard error."""
    try:
        facts = host_facts(msgspec.json.decode(request, type=HostRequest))
    except UserError as error:
        print(error.line(), file=sys.stderr)
        return 1
    print(msgspec.json.encode(facts).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
