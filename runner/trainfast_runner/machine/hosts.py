"""Other machines: their names, the command that runs there through ssh, and one sentence for why it did not.

The contract: the same installation at the same path on each host. OpenSSH's client does the rest, with the user's own
`~/.ssh/config`, keys and agent; it never asks for a password here.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainfast_runner.errors import UserError
from trainfast_runner.records.capped_file import last_line
from trainfast_runner.units import plain, signal_name

LOCAL = "local"
"""The name of this machine, reached without ssh; it may stand twice in a list, as two nodes."""
SSH_VARIABLE = "TRAINFAST_SSH"
"""The variable with the ssh command, split as a shell does: `ssh -F my-config -J gateway`. Default: `ssh`."""
CONNECT_TIMEOUT_S = 5
"""Seconds until a connection that nobody answers counts as failed."""
SSH_FAILED, NOT_FOUND, NOT_EXECUTABLE = 255, 127, 126
"""Exit codes: of ssh itself, and of a shell that cannot start the command."""

_NAME = re.compile(r"[A-Za-z0-9._@:][A-Za-z0-9._@:-]*")
"""Never a leading `-`, which ssh would take for an option."""
_NAME_FORM = "letters, digits and . _ @ : -, not beginning with -"
_FILE_FORM = "one host a line, as `box1 slots=4`; comments begin with #"


@dataclass(frozen=True)
class Host:
    """A machine by the name that ssh knows, or `local`; `slots` is the number of processes that a hostfile gives it."""

    name: str
    slots: int | None

    @property
    def is_local(self) -> bool:
        """True for this machine, which is reached without ssh."""
        return self.name == LOCAL


def parse_hosts(text: str | None) -> tuple[Host, ...]:
    """Return the hosts of `a,b`, or those of a file in DeepSpeed's hostfile format; none of None. Raises UserError.

    A text with a `/` in it, or the name of an existing file, is a file.
    """
    if text is None:
        return ()
    path = Path(text).expanduser()
    if "/" in text or (text and path.is_file()):
        hosts = _hosts_of_file(path)
    else:
        hosts = tuple(_host(name.strip(), None, "--hosts") for name in text.split(",")) if text.strip() else ()
        for number, host in enumerate(hosts):
            _refuse_second(host, hosts[:number], "--hosts")
    if not hosts:
        raise UserError(
            "no host is named", key="--hosts", where=plain(text) or "--hosts", allowed=["names such as a,b", _FILE_FORM]
        )
    return hosts


def _hosts_of_file(path: Path) -> tuple[Host, ...]:
    hosts: list[Host] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"{plain(str(path))}: {error.strerror}", key="--hosts", where="--hosts") from None
    except UnicodeDecodeError:
        raise UserError("the file is not text", key="--hosts", where=plain(str(path)), allowed=[_FILE_FORM]) from None
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{plain(str(path))}:{number}"
        name, *rest = words
        slots = None
        if rest:
            key, _, count = rest[0].partition("=")
            if key != "slots" or len(rest) > 1:
                words_left = plain(" ".join(rest))[:60]
                raise UserError(f"{words_left!r} after the host", key="--hosts", where=where, allowed=["slots=N"])
            if not re.fullmatch(r"0*[1-9][0-9]{0,4}", count):
                message = f"slots={plain(count)[:20]} is not a number of processes"
                raise UserError(message, key="--hosts", where=where, allowed=["a whole number from 1 on"])
            slots = int(count)
        host = _host(name, slots, where)
        _refuse_second(host, hosts, where)
        hosts.append(host)
    return tuple(hosts)


def _host(name: str, slots: int | None, where: str) -> Host:
    if not _NAME.fullmatch(name):
        raise UserError(f"{plain(name)[:60]!r} is not a host name", key="--hosts", where=where, allowed=[_NAME_FORM])
    return Host(name, slots)


def _refuse_second(host: Host, before: Sequence[Host], where: str) -> None:
    if not host.is_local and any(host.name == other.name for other in before):
        raise UserError(f"{host.name} stands there twice", key="--hosts", where=where, advice="slots=N in a hostfile")


def host_argv(host: Host, argv: Sequence[str]) -> list[str]:
    """Return the command line that runs `argv` on this host: itself, or ssh with it. Raises UserError without an ssh.

    ssh asks nothing (BatchMode), allocates no terminal, and passes no variable on but what the user's own
    configuration sends: put what the command needs into its arguments.
    """
    if host.is_local:
        return list(argv)
    try:
        ssh = shlex.split(os.environ.get(SSH_VARIABLE, ""))
    except ValueError as error:
        raise UserError(f"the variable is no command line: {error}", key=SSH_VARIABLE, where=SSH_VARIABLE) from None
    ssh = ssh or ["ssh"]
    if shutil.which(ssh[0]) is None:
        raise UserError(f"{plain(ssh[0])} is not installed", key=SSH_VARIABLE, advice="apt-get install openssh-client")
    options = ["-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_TIMEOUT_S}"]
    return [*ssh, *options, host.name, shlex.join(argv)]


def address_family(address: str) -> socket.AddressFamily:
    """The family of sockets for this address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def address_towards(other: str) -> str:
    """The address of this machine from which packets to `other` go; nothing is sent. Raises OSError without a route."""
    with socket.socket(address_family(other), socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))
        return str(probe.getsockname()[0])


def module_argv(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs one of our modules, on this machine or another: the path of Python is equal."""
    return [sys.executable, "-P", "-m", module, *arguments]


def ssh_failure(host: Host, exit_code: int, stderr: str) -> str:
    """Return one sentence for why a command of `host_argv` failed; harmless text on one line, with a cure if known."""
    name = host.name
    last = plain(last_line(stderr.splitlines()) or "").strip()[:200]
    if exit_code in (NOT_FOUND, NOT_EXECUTABLE) or "No module named 'trainfast" in stderr:
        return f"{name} has no trainfast-tui at {plain(sys.executable)}: install it there at the same path"
    if exit_code < 0:
        return f"the command on {name} was ended by {signal_name(-exit_code)}"
    if exit_code == SSH_FAILED and not host.is_local:
        for pattern, sentence in _SSH_SENTENCES:
            if re.search(pattern, stderr):
                return sentence.format(name=name)
    return f"{name}: {last}" if last else f"the command on {name} ended with exit code {exit_code} without an error"


_SSH_SENTENCES = (
    (r"Could not resolve hostname", "{name} is unknown: no host of that name in DNS or ~/.ssh/config"),
    (
        r"HOST IDENTIFICATION HAS CHANGED|host key for .* has changed",
        "{name} shows another host key than before: if that is right, `ssh-keygen -R {name}`, then `ssh {name}` once",
    ),
    (
        r"Host key verification failed|[Nn]o .* host key is known",
        "the host key of {name} is not known yet: run `ssh {name}` once and confirm the key",
    ),
    (r"Permission denied|Too many authentication failures", "{name} takes no key of yours: `ssh-copy-id {name}`"),
    (r"Connection refused", "{name} refuses the connection: no ssh server listens on that port"),
    (
        r"[Tt]imed out|Timeout, server",
        f"{{name}} does not answer within {CONNECT_TIMEOUT_S} s: it is off, or a firewall drops the connection",
    ),
    (r"No route to host|Network is unreachable", "there is no route to {name}: check its network"),
    (r"[Cc]onnection (closed|reset)|Broken pipe", "{name} closed the connection"),
)
"""Patterns of the stderr of OpenSSH's client, each with its sentence."""
