"""The examination of several machines that shall train together: can they reach each other, and are they alike?

On each host `python -P -m trainfast_runner.machine.host_checks` answers requests, one JSON line each, until its stdin
ends; the connection that asks is the only one, and nothing is left there.
"""

from __future__ import annotations

import json
import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import psutil

from trainfast_runner.errors import UserError
from trainfast_runner.machine import training_python
from trainfast_runner.machine.doctor import Finding, judged
from trainfast_runner.machine.hosts import Host, address_family, address_towards, host_argv, module_argv, ssh_failure
from trainfast_runner.machine.telemetry.sampler import take_tick
from trainfast_runner.records.home import Home
from trainfast_runner.records.json_lines import text_of
from trainfast_runner.units import counted, plain

ANSWER_WITHIN_S, REDUCED_WITHIN_S = 20.0, 90.0
"""Seconds for an answer, and for the all-reduce with the imports of torch."""
CONNECTED_WITHIN_S, SEEN_WITHIN_S = 3.0, 5.0
"""Seconds for a TCP connection, and until a new file is seen over a network file system."""
MOST_SKEW_S = 5.0
"""Chosen, not measured: clocks further apart make the times of files and of the host's logs misleading."""
CLOCK_READINGS = 5
GRADIENT_BYTES = 1e9
"""The gradients of an example step."""
FSDP_VOLUME = 1.5
"""FSDP gathers the parameters twice and scatters the gradients once; an all-reduce is a scatter and a gather."""
NCCL_PACKAGE = re.compile(r"nvidia[-_]nccl[-_]cu\d+")


def examine_hosts(home: Home, hosts: Sequence[Host]) -> tuple[list[Finding], dict[str, Any] | None]:
    """Return all findings, and the measured link between the hosts: None if there is none or it cannot be measured.

    The link is `{world_size, backend, bytes, seconds, bus_gb_per_s, ddp_s_per_gb, fsdp_s_per_gb}`. Takes about half a
    minute.
    """
    names = [host.name for host in hosts]
    labels = [name if names.count(name) == 1 else f"{name}#{place}" for place, name in enumerate(names)]
    with ExitStack() as stack:
        agents = [Agent(host, label, stack) for host, label in zip(hosts, labels, strict=True)]
        findings = [agent.introduce() for agent in agents]
        answering = [agent for agent in agents if agent.facts]
        try:
            findings += [*_versions(answering), *_slots(answering), *_shared_home(home, answering)]
            findings += [clock for agent in answering if not agent.host.is_local for clock in _clock(agent)]
            if len(answering) < len(agents) or len(agents) < 2:
                return findings, None
            addresses = _addresses(agents)
            findings += [*_connections(agents, addresses), *_published(agents, addresses)]
            if any(finding.state == "fail" for finding in findings):
                return findings, None
            link = _all_reduce(agents, addresses)
        except UserError as error:  # a host that is gone, or an all-reduce that failed
            name = "all-reduce" if error.key == "all_reduce" else "host"
            return [*findings, Finding(name, "fail", error.message)], None
    lost = f"a ddp step loses up to {link['ddp_s_per_gb']:.2g} s for each GB of gradients"
    rate = f"{link['bus_gb_per_s']:.3g} GB/s between {counted(len(agents), 'host')} over {link['backend']}"
    rest = f"fsdp {link['fsdp_s_per_gb']:.2g} s, less what runs beside the backward pass"
    return [*findings, Finding("all-reduce", "ok", f"{rate}: {lost}, {rest}")], link


class Agent:
    """The connection to one host: a child that answers one request after the other."""

    def __init__(self, host: Host, label: str, stack: ExitStack) -> None:
        """Start the child; `stack` ends it."""
        self.host, self.label = host, label
        self.facts: dict[str, Any] = {}
        """The answer to `facts`; empty for a host that does not answer."""
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._errors = stack.enter_context(training_python.open_temporary_file())
        pipe = subprocess.PIPE
        argv = host_argv(host, module_argv("trainfast_runner.machine.host_checks"))
        self._child = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=self._errors, start_new_session=True)
        stack.callback(self._end)
        threading.Thread(target=self._read, name=f"doctor-{label}", daemon=True).start()

    def _end(self) -> None:
        assert self._child.stdin is not None
        with suppress(OSError):
            self._child.stdin.close()
        try:
            self._child.wait(1)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def _read(self) -> None:
        assert self._child.stdout is not None
        with self._child.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(b"")

    def ask(self, request: str, *arguments: object) -> Any:
        """Return the answer to a request. Raises UserError for none."""
        self.send(request, *arguments)
        return self.receive(request, ANSWER_WITHIN_S)

    def send(self, request: str, *arguments: object) -> None:
        """Send a request, whose answer `receive` waits for."""
        assert self._child.stdin is not None
        with suppress(OSError):  # a child that has ended: `receive` says why
            self._child.stdin.write(json.dumps([request, *arguments]).encode() + b"\n")
            self._child.stdin.flush()

    def receive(self, request: str, within_s: float) -> Any:
        """Return the next answer. Raises UserError."""
        deadline_s = time.monotonic() + within_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                raise UserError(f"{self.label} does not answer within {within_s:.0f} s", key=request) from None
            if not line:
                failure = ssh_failure(self.host, self._child.wait(), training_python.whole_text(self._errors))
                raise UserError(failure, key=request)
            for answer in training_python.json_objects([line]):  # a login script may print a greeting
                if "error" in answer:
                    raise UserError(f"{self.label}: {plain(str(answer['error']))[:200]}", key=request)
                return answer.get("answer")

    def introduce(self) -> Finding:
        """Ask for the facts, and return whether the host answers."""
        try:
            self.facts = self.ask("facts")
            round_trip_s = min(self.clock()[1] for _ in range(CLOCK_READINGS))
        except UserError as error:
            return Finding("reachable", "fail", error.message)
        way = "on this machine" if self.host.is_local else "over ssh"
        return Finding("reachable", "ok", f"{self.label} answers {way} in {1e3 * round_trip_s:.1f} ms")

    def clock(self) -> tuple[float, float]:
        """Return the seconds that the clock there is ahead of ours, and the round trip in seconds."""
        began_s, began_wall_s = time.monotonic(), time.time()
        there_s = float(self.ask("clock"))
        round_trip_s = time.monotonic() - began_s
        return there_s - (began_wall_s + round_trip_s / 2), round_trip_s


def _versions(agents: Sequence[Agent]) -> Iterator[Finding]:
    """The equal versions, and each that differs."""
    versions = [(agent.label, agent.facts["versions"]) for agent in agents]
    equal: list[str] = []
    for name in versions[0][1] if versions else ():
        found = {label: plain(one.get(name) or "none") for label, one in versions}
        if len(set(found.values())) == 1:
            equal.append(f"{name} {versions[0][1][name] or 'none'}")
            continue
        cure = f"install the same {name} on each host"
        words = ", ".join(f"{label} {version}" for label, version in found.items())
        yield Finding("versions", "warn" if name == "driver" else "fail", f"{name} differs: {words}", cure)
    if equal:
        yield Finding("versions", "ok", f"equal: {plain(', '.join(equal))}")


def _slots(agents: Sequence[Agent]) -> Iterator[Finding]:
    """The GPUs of each host against its slots; a host without GPUs has one."""
    for agent in agents:
        gpus, slots = int(agent.facts["gpus"]), agent.host.slots
        words = f"{agent.label} has {counted(gpus, 'GPU')}" + (f" for slots={slots}" if slots is not None else "")
        is_enough = slots is None or slots <= max(1, gpus)
        yield judged("GPUs", is_enough, words, f"slots={max(1, gpus)}", "fail")


def _shared_home(home: Home, agents: Sequence[Agent]) -> Iterator[Finding]:
    """The hosts that do not see a file written here."""
    home.create()
    path, nonce = home.path / f".seen-by-hosts-{uuid.uuid4().hex}", uuid.uuid4().hex
    path.write_text(nonce)
    try:
        blind = [agent.label for agent in agents if not agent.ask("sees", str(path), nonce)]
    finally:
        path.unlink(missing_ok=True)
    if blind:
        words = f"{', '.join(blind)} cannot see {home.path} of this machine"
        yield Finding("shared home", "fail", words, "set TRAINFAST_HOME to a folder on a file system that all share")
    elif agents:
        yield Finding("shared home", "ok", f"{home.path} is seen on {counted(len(agents), 'host')}")


def _clock(agent: Agent) -> Iterator[Finding]:
    ahead_s, round_trip_s = min((agent.clock() for _ in range(CLOCK_READINGS)), key=lambda reading: reading[1])
    words = f"{agent.label}'s clock is {abs(ahead_s):.3f} s {'ahead' if ahead_s > 0 else 'behind'}"
    finding, cure = f"{words} (± {round_trip_s / 2:.3f} s)", "start a time service there, such as chrony"
    yield judged("clock", abs(ahead_s) <= MOST_SKEW_S, finding, cure)


def _addresses(agents: Sequence[Agent]) -> list[str]:
    """The address at which each host is reached: where ssh reached it; for this machine, where ssh comes from."""
    # The variable's words: the client's address and port, then the server's.
    connections = [None if one.host.is_local else (one.facts["connection"] or "").split() for one in agents]
    own = next((words[0] for words in connections if words), "127.0.0.1")
    return [words[2] if words else own for words in connections]


def _connections(agents: Sequence[Agent], addresses: Sequence[str]) -> Iterator[Finding]:
    """The TCP connections of each host to node 0, and of node 0 to each host, at a free port."""
    for place in range(1, len(agents)):
        for source, target in ((place, 0), (0, place)):
            address, other = addresses[target], agents[target]
            port = other.ask("listen", address)
            answer = agents[source].ask("connect", address, port)
            ways = f"{other.label} at {address}"
            if isinstance(answer, str):
                words = f"{agents[source].label} cannot reach {ways}, port {port}: {plain(answer)[:80]}"
                yield Finding("connection", "fail", words, "open all TCP ports between the hosts in their firewalls")
            else:
                yield Finding("connection", "ok", f"{agents[source].label} reaches {ways} in {1e3 * answer:.1f} ms")


def _published(agents: Sequence[Agent], addresses: Sequence[str]) -> Iterator[Finding]:
    """The address from which each host talks to the others, which it gives them as its own."""
    for place, agent in enumerate(agents):
        agent.facts["address"] = address = plain(str(agent.ask("source", addresses[0 if place else 1])))
        is_hidden = address.startswith("127.") and not all(one.startswith("127.") for one in addresses)
        words, cure = f"{agent.label} would publish {address}", "name the hosts by addresses of one network"
        yield judged("address", not is_hidden, words, cure, "fail")


def _all_reduce(agents: Sequence[Agent], addresses: Sequence[str]) -> dict[str, Any]:
    """The time of an all-reduce between one process a host, under torchrun. Raises UserError."""
    address = f"[{addresses[0]}]" if ":" in addresses[0] else addresses[0]
    rendezvous = f"{address}:{agents[0].ask('free_port')}", uuid.uuid4().hex
    for place, agent in enumerate(agents):
        agent.send("all_reduce", *rendezvous, place == 0, agent.facts["address"], len(agents))
    answers = [agent.receive("all_reduce", REDUCED_WITHIN_S) for agent in agents]
    link: dict[str, Any] = next((answer for answer in answers if answer), {})
    if link.get("world_size") != len(agents):
        raise UserError(f"{link.get('world_size', 0)} of {len(agents)} hosts came together", key="all_reduce")
    per_byte_s = link["seconds"] / link["bytes"]
    # As NCCL's tests count it: each link carries 2 (n - 1) / n of the bytes.
    link["bus_gb_per_s"] = 2 * (len(agents) - 1) / len(agents) / per_byte_s / 1e9
    link["ddp_s_per_gb"] = GRADIENT_BYTES * per_byte_s
    link["fsdp_s_per_gb"] = FSDP_VOLUME * link["ddp_s_per_gb"]
    return link


class Answers:
    """The answers of a host: a method a request, its arguments those of the line."""

    def __init__(self) -> None:
        self._torchrun: subprocess.Popen[bytes] | None = None

    def facts(self) -> dict[str, Any]:
        """Versions, GPUs, and how ssh came here."""
        versions = {one.name: one.version for one in metadata.distributions() if one.name}
        nccl = next((versions[name] for name in versions if NCCL_PACKAGE.fullmatch(name)), None)
        driver = re.search(r"\s(\d+(?:\.\d+)+)\s", text_of(Path("/proc/driver/nvidia/version")))
        compared = {name: versions.get(name) for name in ("trainfast-tui", "torch")}
        return {
            "versions": {**compared, "NCCL": nccl, "driver": driver[1] if driver else None},
            "gpus": sum(gpu.error is None for gpu in take_tick(settle_s=0).devices),
            "connection": os.environ.get("SSH_CONNECTION"),
        }

    def clock(self) -> float:
        """Seconds since 1970."""
        return time.time()

    def sees(self, path: str, nonce: str) -> bool:
        """True once this file has this text; a network file system may take a few seconds."""
        deadline_s = time.monotonic() + SEEN_WITHIN_S
        while time.monotonic() < deadline_s:
            if text_of(Path(path)) == nonce:
                return True
            time.sleep(0.1)
        return False

    def source(self, address: str) -> str:
        """The address of this machine from which it talks to that one; nothing is sent."""
        return address_towards(address)

    def listen(self, address: str) -> int:
        """Listen on a free port until the end of this process, and return it."""
        self._listening = socket.create_server(("", 0), family=address_family(address))
        return int(self._listening.getsockname()[1])

    def connect(self, address: str, port: int) -> float | str:
        """The seconds of a connection, or the reason for none."""
        began_s = time.monotonic()
        try:
            socket.create_connection((address, port), timeout=CONNECTED_WITHIN_S).close()
        except OSError as error:
            return error.strerror or "no answer, perhaps a firewall"
        return time.monotonic() - began_s

    def free_port(self) -> int:
        """A port that is free now."""
        with socket.socket() as one:
            one.bind(("", 0))
            return int(one.getsockname()[1])

    def all_reduce(self, endpoint: str, id: str, is_first: bool, address: str, hosts: int) -> dict[str, Any] | None:
        """Run one rank under torchrun, and return its JSON line. Raises OSError with the reason for none."""
        options = {
            "--nnodes": str(hosts),
            "--nproc-per-node": "1",
            "--rdzv-backend": "c10d",
            "--rdzv-endpoint": endpoint,
            "--rdzv-id": id,
            "--rdzv-conf": f"is_host={str(is_first).lower()},join_timeout=40",
            "--local-addr": address,  # else torch publishes the fully qualified name, which may not resolve
        }
        words = [f"{name}={value}" for name, value in options.items()]
        program = str(training_python.PROGRAMS / "all_reduce.py")
        command = [sys.executable, "-P", "-m", "torch.distributed.run", *words, program]
        interfaces = psutil.net_if_addrs().items()
        interface = next((name for name, own in interfaces if any(one.address == address for one in own)), None)
        chosen = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {}
        with TemporaryFile() as printed, TemporaryFile() as errors:
            self._torchrun = subprocess.Popen(
                command,
                env={**chosen, **training_python.own_environment(), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=errors,
            )
            if self._torchrun.wait():
                raise OSError(training_python.last_error_line(training_python.whole_text(errors)))
            return next(training_python.json_objects(training_python.whole_text(printed).splitlines()), None)

    def end(self) -> None:
        """End torchrun and its rank, which is in a session of its own."""
        if self._torchrun is None:
            return
        with suppress(psutil.Error):
            torchrun = psutil.Process(self._torchrun.pid)
            for process in (torchrun, *torchrun.children(recursive=True)):
                process.kill()


def main() -> None:
    """Answer the requests on stdin until it ends, which also ends an answer that is still being made."""
    answers = Answers()

    def answer(request: str, *arguments: Any) -> None:
        try:
            line = json.dumps({"answer": getattr(answers, request)(*arguments)})
        except Exception as error:  # the other side names it
            line = json.dumps({"error": str(error) or type(error).__name__})
        with suppress(OSError):
            print(line, flush=True)

    for line in sys.stdin:
        threading.Thread(target=answer, args=json.loads(line), daemon=True).start()
    answers.end()
    os._exit(0)


if __name__ == "__main__":
    main()
