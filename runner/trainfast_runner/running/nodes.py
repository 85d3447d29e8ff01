"""A run on several nodes: what their supervisors tell each other through the shared home, and how their ranks meet.

Every node has a supervisor. It writes a beat a second, reads the beats, events and stop requests of the others, and
ends its own ranks once another node is lost or has failed. Beats are compared by their content, so clocks that differ
between machines do not matter; files are opened for each look, which makes NFS ask its server (close-to-open).
"""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from trainfast_runner.machine.hosts import address_family, address_towards
from trainfast_runner.machine.processes import boot_id
from trainfast_runner.records.json_lines import Tail, text_of
from trainfast_runner.records.run_directory import EVENTS_FILE, RunRecords, node_file, read_events
from trainfast_runner.records.run_file import RunFile, RunNode
from trainfast_runner.records.run_lines import Event, NodeStart, TrainingEnd
from trainfast_runner.units import plain
from trainfast_runner.worker.shared.words import NODE_VARIABLE

BEAT_S = 1.0
"""Seconds between two beats of a node."""
SILENT_S = 10.0
"""Silence after which a node is lost."""
STARTS_WITHIN_S = 60.0
"""Chosen, not measured: time for every node to begin; batch systems and cold file systems take tens of seconds."""
REACHED_WITHIN_S = 5.0
"""Chosen, not measured: time for a connection between two nodes."""
STOP_FILE = "stop"
"""The file by which the run is asked to end on every node; its content is one of the words below."""
STOP, KILL, BY_SLURM = "stop", "kill", "slurm"
LOOPBACK = "127.0.0.1"
TORCHRUN = "torch.distributed.run"


def ask_all_nodes(directory: Path, word: str) -> None:
    """Ask every node of the run to end its ranks, with KILL at once; BY_SLURM where Slurm asked."""
    with suppress(OSError):  # a full disk: the node that was asked ends, and the others with it
        (directory / STOP_FILE).write_text(word)


def stop_word(directory: Path) -> str:
    """The word by which the run was asked to end; empty before."""
    return text_of(directory / STOP_FILE)


def node_label(run: RunFile, node: int) -> str:
    """`node 1 (box2)`."""
    host = run.nodes[node].host if node < len(run.nodes) else ""
    return f"node {node} ({host})" if host else f"node {node}"


def cannot_reach(address: str, port: int, owner: str = "") -> str:
    """`10.0.0.1 port 41234: Connection refused` if nobody can be reached there; else empty."""
    try:
        socket.create_connection((address, port), REACHED_WITHIN_S).close()
    except OSError as error:
        reason = "no answer: a firewall?" if isinstance(error, TimeoutError) else error.strerror
        return f"{address} port {port}{owner}: {reason}"
    return ""


class Nodes:
    """The link of one node's supervisor to the others. `look` is called about four times a second."""

    def __init__(self, directory: Path, run: RunFile, node: int) -> None:
        self.node, self._directory, self._run = node, directory, run
        self._listener: socket.socket | None = None
        self._met: list[socket.socket] = []
        self.start = NodeStart(
            host=socket.gethostname(),
            address=(address := own_address(run.nodes[node])),
            port=self._listen(address) if node == 0 else None,
            boot_id=boot_id(),
            monotonic_ns=time.monotonic_ns(),
            wall_ns=time.time_ns(),
        )
        self.stop_word = ""
        """As of `stop_word`."""
        self.lost: dict[int, str] = {}
        """Lost nodes, each with the reason in words."""
        self._others = {other: _OtherNode(directory, other) for other in range(len(run.nodes)) if other != node}
        self._beats, self._due_s = 0, 0.0

    def look(self) -> None:
        """Write this node's beat and read the others, at most once a `BEAT_S`."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        self._due_s = now_s + BEAT_S
        self._beats += 1
        with suppress(OSError):  # on a full disk the others see this node as lost
            (self._directory / f"node{self.node}.beat").write_text(str(self._beats))
        self.stop_word = stop_word(self._directory)
        for number, other in self._others.items():
            other.look(now_s)
            silent_s = None if other.end else other.silent_s(now_s, is_awaited=not self.stop_word)
            if silent_s is not None and number not in self.lost:
                label = node_label(self._run, number)
                self.lost[number] = f"{label} is lost: its supervisor was silent for {silent_s:.0f} s"

    def _listen(self, address: str) -> int:
        """Take a free port for the rendezvous and return it; listen there until the other nodes have reached it.

        The socket that only holds it keeps it from all who ask for a free one, and torchrun can listen beside it.
        """
        self._holder = socket.socket(family := address_family(address))
        self._holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._holder.bind((address, 0))
        port = int(self._holder.getsockname()[1])
        self._listener = socket.create_server((address, port), family=family, backlog=len(self._run.nodes))
        self._listener.setblocking(False)
        return port

    def meet(self) -> tuple[str, int] | None:
        """Return address and port of the ranks' rendezvous once every node can reach them; None while one has to come.

        Raises NotPlaced for a node that cannot.
        """
        if self.node != 0:
            start = self._others[0].start
            if start is None or start.port is None:
                return None
            if unreachable := cannot_reach(start.address, start.port, f" of {node_label(self._run, 0)}"):
                raise NotPlaced(f"{node_label(self._run, self.node)} cannot reach {unreachable}")
            return start.address, start.port
        if self._listener is not None:
            with suppress(BlockingIOError):
                self._met.append(self._listener.accept()[0])
            if len(self._met) < len(self._others):
                return None
            for one in (*self._met, self._listener):
                one.close()  # torchrun listens on the same port next
            self._listener = None
        assert self.start.port is not None
        return self.start.address, self.start.port

    def port_taken(self) -> str | None:
        """Who listens on the port of the rendezvous although torchrun has ended, in words; None for nobody."""
        import psutil

        with suppress(OSError, psutil.Error):
            for one in psutil.net_connections("tcp") if self.node == 0 else ():
                if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr[1] == self.start.port:
                    who = f"{psutil.Process(one.pid).name()} (process {one.pid})" if one.pid else "another program"
                    return f"{plain(who)} took port {self.start.port} before torchrun on node 0: run it again"
        return None

    def failed_node(self) -> int | None:
        """The first other node whose ranks have ended without success; None without one."""
        ends = ((number, other.end) for number, other in self._others.items())
        return next(
            (number for number, end in ends if end is not None and (end.exit_code != 0 or end.lost_ranks)), None
        )

    def reason_of(self, node: int | None) -> str | None:
        """The reason why the ranks of this other node were not started."""
        end = None if node is None else self._others[node].end
        return None if end is None else end.spawn_error

    def have_ended(self) -> bool:
        """True once every other node has recorded its end or is lost."""
        return all(other.end is not None or number in self.lost for number, other in self._others.items())

    def settles(self) -> bool:
        """True if this node writes the result: node 0, or the first whose supervisor is still there."""
        now_s = time.monotonic()
        return all(self._others[number].silent_s(now_s, is_awaited=True) is not None for number in range(self.node))


class NotPlaced(Exception):
    """The ranks of a node were not started: it cannot reach the others, or the run ended before."""


class _OtherNode:
    """Another node, by its files in the run directory."""

    def __init__(self, directory: Path, node: int) -> None:
        self.start: NodeStart | None = None
        self.end: TrainingEnd | None = None
        self._path = directory / f"node{node}.beat"
        self._tail = Tail(node_file(directory, EVENTS_FILE, node), Event)
        self._beat, self._changed_s = "", time.monotonic()

    def look(self, now_s: float) -> None:
        """Read the node's beat and its new events."""
        if (beat := text_of(self._path)) and beat != self._beat:
            self._beat, self._changed_s = beat, now_s
        with suppress(OSError):
            for event in self._tail.new():
                self.start, self.end = event.node or self.start, event.end or self.end

    def silent_s(self, now_s: float, *, is_awaited: bool) -> float | None:
        """Seconds since the node's last sign of life if those are too many; else None.

        A node that has not begun has longer, while it `is_awaited`.
        """
        silent_s = now_s - self._changed_s
        return silent_s if silent_s > (SILENT_S if self._beat or not is_awaited else STARTS_WITHIN_S) else None


def own_address(node: RunNode) -> str:
    """The address that this node publishes: that of the launch, that of ssh's connection, or that towards Slurm's."""
    if node.address:
        return node.address
    # sshd's variable: the client's address and port, then the server's (sshd(8)).
    connection = os.environ.get("SSH_CONNECTION", "").split()
    if len(connection) == 4:
        return connection[2]
    try:
        return address_towards(os.environ.get("SLURM_LAUNCH_NODE_IPADDR", LOOPBACK))
    except OSError:
        return LOOPBACK


def node_argv(run: RunFile, nodes: Nodes, endpoint: tuple[str, int]) -> list[str]:
    """The command of torchrun on this node: that of `run.json` with the place where the ranks meet.

    Without `--local-addr` torch publishes `socket.getfqdn()`, which other machines often cannot resolve.
    """
    address, port = endpoint
    host = f"[{address}]" if ":" in address else address
    options = [
        f"--nproc-per-node={run.nodes[nodes.node].world_size}",
        f"--rdzv-endpoint={host}:{port}",
        f"--rdzv-conf=is_host={'true' if nodes.node == 0 else 'false'}",
        f"--local-addr={nodes.start.address}",
    ]
    after = run.argv.index(TORCHRUN) + 1
    return [*run.argv[:after], *options, *run.argv[after:]]


def node_variables(run: RunFile, nodes: Nodes) -> dict[str, str]:
    """The variables of this node's ranks: its number, and the interface to the other nodes for gloo and NCCL."""
    # Only here: the app, which stops and settles runs, loads this module before its first frame.
    import psutil

    from trainfast_runner.machine.devices import visible_to

    variables = {NODE_VARIABLE: str(nodes.node)}
    if uuids := run.nodes[nodes.node].device_uuids:
        variables |= visible_to(uuids)
    address = nodes.start.address
    if not address.startswith("127."):
        names = [name for name, found in psutil.net_if_addrs().items() if address in {one.address for one in found}]
        variables |= {variable: name for name in names for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    return variables


def end_of_nodes(directory: Path, run: RunFile, own: Event | None) -> Event | None:
    """The ended event with the ends of all nodes as one; None where no node has recorded one.

    `own` is that of the node that settles, which a full disk may not have taken. A node without an end is lost.
    torchrun's agent on a node that outlives another waits for 300 s and exits with status 0: a status is believed only
    where every node has one.
    """
    numbers = range(len(run.nodes))
    events = {node: read_events(directory, RunRecords(), node) for node in numbers}
    found = {node: event for node in numbers for event in events[node] if event.end is not None}
    ended = own or next(iter(found.values()), None)
    if ended is None or ended.end is None:
        return None
    ends = {node: event.end for node, event in found.items() if event.end is not None} or {0: ended.end}
    lost = {node: reason for end in ends.values() for node, reason in end.lost_nodes.items() if node not in ends}
    for node in numbers:
        if node not in ends:
            lost.setdefault(node, f"{node_label(run, node)} is lost: its supervisor ended before its ranks did")
    failures = [end for end in ends.values() if end.exit_code != 0]
    # Its own failure outweighs that of a node which was ended for it.
    first = next((end for end in failures if end.torn_down_reason is None), (failures or [ended.end])[0])
    killed = next(
        (
            f"torchrun on {node_label(run, node)} died of {signal.Signals(-end.exit_code).name}"
            for node, end in sorted(ends.items())
            if end.exit_code is not None and end.exit_code < 0 and not end.torn_down_reason and end.stop_ns is None
        ),
        None,
    )
    end = msgspec.structs.replace(
        first,
        spawn_error=next((end.spawn_error for end in ends.values() if end.spawn_error is not None), None),
        lost_ranks=tuple(rank for end in ends.values() for rank in end.lost_ranks),
        oom_kills=sum(end.oom_kills for end in ends.values()),
        stop_ns=min((end.stop_ns for end in ends.values() if end.stop_ns is not None), default=None),
        sigkill=any(end.sigkill and end.stop_ns is not None for end in ends.values()),
        full_disk_text=next((end.full_disk_text for end in ends.values() if end.full_disk_text is not None), None),
        lost_nodes=lost,
        killed_agent=killed,
        unended=[process for end in ends.values() for process in end.unended],
    )
    return msgspec.structs.replace(ended, end=end)
