"""A real sshd on a loopback port, with keys of its own and an ssh configuration that names its hosts.

Debian's sshd is taken where it is installed; else apt downloads its packages, checked against the archive's signed
checksums, and they are unpacked, not installed.
"""

import fcntl
import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PACKAGES = "openssh-server", "libwrap0"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainfast-tui-tests" / "sshd"
DOWNLOADED_WITHIN_S, STARTED_WITHIN_S = 120.0, 20.0
AS_ROOT = """
mount --bind "$1/passwd" /etc/passwd && mount -t tmpfs tmpfs /run && mkdir -m 0755 /run/sshd && shift && exec "$@"
"""
"""root's sshd wants an account `sshd` and a folder; both stand in a mount namespace of its own."""


class NoSshd(Exception):
    """There is no sshd here, for this reason."""


@dataclass(frozen=True)
class Sshd:
    """A running sshd."""

    ssh: str
    """The value of TRAINFAST_SSH."""
    name: str
    """The name of its host; `second` is another one for the same machine."""
    second: str
    pid: int
    """The process id of the listening sshd; its sessions are its children."""
    folder: Path
    """The folder of keys and configuration: `ssh_config` may get more hosts."""


def program() -> tuple[Path, dict[str, str]]:
    """The path of sshd, and the environment that it needs. Raises NoSshd."""
    for ssh in ("ssh", "ssh-keygen"):
        if shutil.which(ssh) is None:
            raise NoSshd(f"{ssh} is not installed")
    if installed := shutil.which("sshd", path=f"/usr/sbin:/usr/local/sbin:{os.environ.get('PATH', '')}"):
        return Path(installed), {}
    unpacked = CACHE / "root"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (unpacked / "usr/sbin/sshd").exists():
            _download(unpacked)
    libraries = ":".join(str(path) for path in (unpacked / "usr/lib").glob("*-linux-gnu*"))
    return unpacked / "usr/sbin/sshd", {"LD_LIBRARY_PATH": libraries}


def _download(unpacked: Path) -> None:
    try:
        command = ["apt-get", "download", *PACKAGES]
        subprocess.run(command, cwd=CACHE, check=True, capture_output=True, timeout=DOWNLOADED_WITHIN_S)
        for package in CACHE.glob("*.deb"):
            subprocess.run(["dpkg", "-x", str(package), str(unpacked)], check=True, capture_output=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise NoSshd(f"sshd is not installed, and apt-get cannot download it: {error}") from None


@contextmanager
def running(folder: Path) -> Iterator[Sshd]:
    """Start an sshd with its files in `folder`; end it and its sessions. Raises NoSshd."""
    sshd, environment = program()
    folder.mkdir(mode=0o700, exist_ok=True)
    for key in ("host_key", "key", "other_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", key, "-f", str(folder / key)]
        subprocess.run(command, check=True, capture_output=True)
    shutil.copy(folder / "key.pub", folder / "authorized_keys")
    port = _free_port()
    server_lines = {
        "ListenAddress": f"127.0.0.1:{port}", "HostKey": folder / "host_key",
        "AuthorizedKeysFile": folder / "authorized_keys", "PidFile": "none", "StrictModes": "no", "UsePAM": "no",
        "PasswordAuthentication": "no", "KbdInteractiveAuthentication": "no", "MaxStartups": "100",
    }  # fmt: skip
    (folder / "sshd_config").write_text("".join(f"{name} {value}\n" for name, value in server_lines.items()))
    _write_client(folder, port)
    command = [str(sshd), "-D", "-e", "-f", str(folder / "sshd_config")]
    if os.geteuid() == 0:
        (folder / "passwd").write_text(Path("/etc/passwd").read_text() + "sshd:x:65533:65534::/run/sshd:/bin/false\n")
        command = ["unshare", "-m", "sh", "-c", AS_ROOT, "sh", str(folder), *command]
    with (folder / "sshd.log").open("w") as log:
        server = subprocess.Popen(
            command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        _until_listening(server, port, folder / "sshd.log")
        yield Sshd(f"ssh -F {folder / 'ssh_config'}", "box1", "box2", server.pid, folder)
    finally:
        server.terminate()
        server.wait()


def _write_client(folder: Path, port: int) -> None:
    """Write the configuration of the client: two names of the server, and hosts that fail each in its own way."""
    host_key = (folder / "host_key.pub").read_text().split()[:2]
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {' '.join(host_key)}\n")
    other_key = (folder / "other_key.pub").read_text().split()[:2]
    (folder / "changed_hosts").write_text(f"[127.0.0.1]:{port} {' '.join(other_key)}\n")
    (folder / "no_hosts").touch()
    blocks = [
        ("nokey", f"IdentityFile {folder / 'other_key'}"),
        ("refused", f"Port {_free_port()}"),
        ("newbox", f"UserKnownHostsFile {folder / 'no_hosts'}"),
        ("changed", f"UserKnownHostsFile {folder / 'changed_hosts'}"),
    ]
    for_all = [
        *("Host *.invalid\n", "HostName %h\n"),
        "Host *\n",
        *("HostName 127.0.0.1\n", f"Port {port}\n", f"User {pwd.getpwuid(os.geteuid()).pw_name}\n"),
        *("IdentitiesOnly yes\n", "IdentityAgent none\n"),
        *(f"UserKnownHostsFile {folder / 'known_hosts'}\n", "GlobalKnownHostsFile none\n"),
        # ssh offers the keys of every block that matches.
        *("Host * !nokey\n", f"IdentityFile {folder / 'key'}\n"),
    ]
    text = "".join(f"Host {name}\n  {line}\n" for name, line in blocks)
    (folder / "ssh_config").write_text(text + "".join(for_all))


def _until_listening(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline_s = time.monotonic() + STARTED_WITHIN_S
    while server.poll() is None and time.monotonic() < deadline_s:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.02)
    raise NoSshd(f"sshd does not start: {log.read_text().strip() or 'no reason given'}")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
