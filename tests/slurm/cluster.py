"""`make test-slurm`: a real Slurm of two nodes on this machine for as long as its tests run; installs nothing.

Debian's packages come through apt, which checks its index's signature; a package that differs from the index's SHA-256
is refused. They stay in `$XDG_CACHE_HOME/trainfast-tests/slurm`. All else is in a temporary folder.
"""

import ctypes
import hashlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge")
TESTS = Path(__file__).parent
READY_WITHIN_S, POLL_S = 60.0, 0.1
PR_SET_CHILD_SUBREAPER = 36
CONFIGURATION = """\
ClusterName=trainfast
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={state}/munge.socket
CredType=cred/munge
PluginDir={plugins}
StateSaveLocation={state}/controller
SlurmdSpoolDir={state}/%n
SlurmctldPidFile={state}/slurmctld.pid
SlurmdPidFile={state}/%n.pid
SlurmctldLogFile={state}/slurmctld.log
SlurmdLogFile={state}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0
AccountingStorageType=accounting_storage/none
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
KillWait=2
ReturnToService=2
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]},{ports[2]} CPUs=2
PartitionName=usual Nodes=n[1-2] Default=YES PriorityTier=1
PartitionName=urgent Nodes=n[1-2] PriorityTier=2
"""


class Unavailable(Exception):
    """No Slurm can be started here, for this reason."""


def main() -> int:
    """Run the tests of Slurm beside a fresh cluster; return their exit code, 0 where the packages are unavailable."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    # What a daemon leaves behind becomes a child of this process, which ends it.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    folder = Path(tempfile.mkdtemp(prefix="trainfast-slurm-"))
    try:
        unpacked = unpack(packages(), folder / "root")
        command = [sys.executable, "-m", "pytest", "-m", "slurm", str(TESTS), *sys.argv[1:]]
        return subprocess.run(command, env=start(unpacked, folder)).returncode
    except Unavailable as reason:
        print(f"make test-slurm: skipped: {reason}")
        return 0
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        end_children()
        shutil.rmtree(folder, ignore_errors=True)


def packages() -> list[Path]:
    """Return the packages, in the cache and as apt's index describes them. Raises Unavailable."""
    if missing := [name for name in ("apt-get", "dpkg") if shutil.which(name) is None]:
        raise Unavailable(f"{missing[0]} is not on PATH")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainfast-tests" / "slurm"
    (cache / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    try:
        return download(cache, [])
    except Unavailable as reason:
        # This machine's lists may be missing or older than the archive: lists of our own need no right to write.
        own = ["-o", f"Dir::State::Lists={cache}/lists", "-o", f"Dir::Cache={cache}/apt"]
        try:
            ask("apt-get", *own, "update", folder=cache)
            return download(cache, own)
        except Unavailable:
            raise reason from None


def download(cache: Path, options: Sequence[str]) -> list[Path]:
    """Fetch what the cache lacks of the packages and of what they need here. Raises Unavailable."""
    simulated = ask("apt-get", *options, "install", "-s", "--no-install-recommends", *PACKAGES, folder=cache)
    names = sorted({*PACKAGES, *re.findall(r"^Inst (\S+)", simulated, re.MULTILINE)})
    # In a folder without the packages: apt leaves out those that are there.
    found = ask("apt-get", *options, "download", "--print-uris", *names, folder=cache / "lists")
    sums = dict(re.findall(r"^'\S+' (\S+) \d+ SHA256:([0-9a-f]{64})$", found, re.MULTILINE))
    if len(sums) != len(names):
        raise Unavailable("apt's index has no SHA-256 for each package")
    for name in sums:
        path = cache / name
        if not is_intact(path, sums[name]):
            path.unlink(missing_ok=True)
            ask("apt-get", *options, "download", name.partition("_")[0], folder=cache)
        if not is_intact(path, sums[name]):
            path.unlink(missing_ok=True)
            raise Unavailable(f"{name} is not the file of apt's index")
    return [cache / name for name in sums]


def is_intact(path: Path, sha256: str) -> bool:
    """True if the file is there and has this checksum."""
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256


def ask(*command: str, folder: Path) -> str:
    """Return what a command prints. Raises Unavailable with its last line when it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise Unavailable(f"{' '.join(command[:1])}: {last}")
    return done.stdout


def unpack(archives: Sequence[Path], root: Path) -> Path:
    """Unpack packages below a folder, which is returned."""
    for path in archives:
        ask("dpkg", "-x", str(path), str(root), folder=path.parent)
    return root


def start(root: Path, state: Path) -> dict[str, str]:
    """Start munged, slurmctld and two slurmd; return the environment for Slurm's commands once both nodes are idle."""
    libraries = next(root.glob("usr/lib/*/slurm-wlm"))
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SQUEUE"))},
        "LD_LIBRARY_PATH": f"{libraries}:{libraries.parent}",
        "PATH": f"{root}/usr/bin:{os.environ['PATH']}",
        "SLURM_CONF": f"{state}/slurm.conf",
        "TRAINFAST_TEST_SLURM": str(state),
    }
    host, user = socket.gethostname().partition(".")[0], psutil.Process().username()
    words = {"host": host, "user": user, "ports": free_ports(3), "state": state, "plugins": libraries}
    (state / "slurm.conf").write_text(CONFIGURATION.format(**words))
    (state / "controller").mkdir()
    (state / "munge.key").write_bytes(os.urandom(128))
    (state / "munge.key").chmod(0o600)

    def program(name: str) -> str:
        return str(next(root.glob(f"usr/sbin/{name}*")))

    files = [f"--{name}-file={state}/munge.{name}" for name in ("key", "pid", "seed", "log")]
    # munged refuses to run as root without --force.
    munged = [program("munged"), "--foreground", "--force", f"--socket={state}/munge.socket", *files]
    slurmd = [program("slurmd"), "-D", "-d", program("slurmstepd"), "-N"]
    commands = [munged, [program("slurmctld"), "-D", "-c"], [*slurmd, "n1"], [*slurmd, "n2"]]
    daemons = []
    with (state / "daemons.log").open("wb") as log:
        for command in commands:
            # A session of its own: Ctrl-C ends the tests first.
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
            daemons.append(process)
            if command is munged:
                wait_until(lambda: (state / "munge.socket").exists(), daemons, state)
    wait_until(lambda: idle_nodes(environment) == 2, daemons, state)
    return environment


def idle_nodes(environment: dict[str, str]) -> int:
    """Return how many nodes sinfo(1) calls idle; 0 while the controller does not answer."""
    sinfo = ["sinfo", "-h", "-N", "-p", "usual", "-t", "idle", "-o", "%N"]
    return len(subprocess.run(sinfo, env=environment, capture_output=True, text=True).stdout.split())


def wait_until(condition: Callable[[], bool], daemons: Sequence[subprocess.Popen[bytes]], state: Path) -> None:
    """Wait for the condition. Raises RuntimeError with the logs if a daemon ends or it takes too long."""
    deadline_s = time.monotonic() + READY_WITHIN_S
    while not condition():
        if any(process.poll() is not None for process in daemons) or time.monotonic() > deadline_s:
            logs = "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in sorted(state.glob("*.log")))
            raise RuntimeError(f"Slurm did not start:\n{logs}")
        time.sleep(POLL_S)


def free_ports(count: int) -> list[int]:
    """Return as many free ports of this machine."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def end_children() -> None:
    """Kill what this process started and what that left behind; their files are of no use to anyone."""
    while left := psutil.Process().children(recursive=True):
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=1.0)


if __name__ == "__main__":
    sys.exit(main())
