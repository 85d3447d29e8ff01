"""`doctor --hosts`: two nodes here, one of them behind a real sshd, and hosts unlike the others."""

import json
import signal
import subprocess
import sys

import psutil
import pytest

from cli.command import until

OTHER_MACHINE = """
import importlib.metadata, time
real, version = time.time, importlib.metadata.Distribution.version
time.time = lambda: real() + 125
importlib.metadata.Distribution.version = property(
    lambda self: "1.2.3" if self.name == "torch" else version.fget(self)
)
"""
"""A Python whose clock is two minutes ahead, with another torch."""
OWN_HOME = """#!/bin/sh
for command; do :; done
export PYTHONPATH='{folder}'
exec unshare -rm sh -c 'mount -t tmpfs tmpfs "$1" && exec sh -c "$2"' sh '{home}' "$command"
"""
"""An ssh to a machine whose TRAINFAST_HOME is a file system of its own."""

# What one test leaves is looked for on the whole machine.
pytestmark = pytest.mark.xdist_group("doctor-hosts")


def findings(done, name):
    """State and sentence of each finding of this name."""
    assert done.code == 0, done.err
    return [(check["state"], check["finding"]) for check in done.json["checks"] if check["name"] == name]


def agents():
    """The pids of all that `doctor --hosts` starts."""
    words = ("machine.host_checks", "programs/all_reduce.py")
    found = psutil.process_iter(["cmdline"])
    return [one.pid for one in found if any(word in " ".join(one.info["cmdline"] or []) for word in words)]


def test_two_hosts_that_are_alike(cli, sshd):
    done = cli("doctor", "--hosts", f"local,{sshd.name}", "--json", TRAINFAST_SSH=sshd.ssh)
    assert done.json["healthy"], done.out
    ways = [sentence.split(" in ")[0] for _, sentence in findings(done, "reachable")]
    assert ways == ["local answers on this machine", f"{sshd.name} answers over ssh"]
    connections = [sentence.split(" in ")[0] for _, sentence in findings(done, "connection")]
    assert connections == [f"{sshd.name} reaches local at 127.0.0.1", f"local reaches {sshd.name} at 127.0.0.1"]
    assert [sentence.split(" would ")[1] for _, sentence in findings(done, "address")] == ["publish 127.0.0.1"] * 2
    for name, words in (("versions", "equal: trainfast-tui "), ("shared home", str(cli.home)), ("clock", sshd.name)):
        [(state, sentence)] = findings(done, name)
        assert state == "ok"
        assert sentence.startswith(words)
    link = done.json["link"]
    assert (link["world_size"], link["backend"]) == (2, "gloo")  # no GPU here
    assert link["ddp_s_per_gb"] == pytest.approx(1e9 * link["seconds"] / link["bytes"])
    assert link["bus_gb_per_s"] == pytest.approx(1 / link["ddp_s_per_gb"])
    [(_, sentence)] = findings(done, "all-reduce")
    assert f"{link['ddp_s_per_gb']:.2g} s for each GB of gradients" in sentence
    until(lambda: not agents(), "the end of all that was started", 10)


def test_hosts_that_cannot_be_reached_are_named_in_one_line_each(cli, sshd, tmp_path):
    hosts = "local,no.such.host.invalid,nokey,refused"
    done = cli("doctor", "--hosts", hosts, "--json", TRAINFAST_SSH=sshd.ssh)
    assert not done.json["healthy"]
    assert done.json["link"] is None
    sentences = [sentence for state, sentence in findings(done, "reachable") if state == "fail"]
    assert [sentence.split(": ")[0] for sentence in sentences] == [
        "no.such.host.invalid is unknown",
        "nokey takes no key of yours",
        "refused refuses the connection",
    ]
    elsewhere = tmp_path / "ssh"
    elsewhere.write_text(f'#!/bin/sh\nfor command; do :; done\nexec sh -c "/nowhere${{command#{sys.executable}}}"\n')
    elsewhere.chmod(0o700)
    done = cli("doctor", "--hosts", "box1", TRAINFAST_SSH=str(elsewhere))
    assert f"box1 has no trainfast-tui at {sys.executable}" in done.out
    assert "Runs cannot start over these hosts" in done.out


def test_a_host_unlike_the_others_is_refused_for_each_difference(cli, tmp_path):
    """Another torch, two minutes, no shared home, fewer GPUs than slots: all without starting torch."""
    if subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "x", str(tmp_path)], capture_output=True).returncode:
        pytest.skip("no namespaces here")
    (tmp_path / "sitecustomize.py").write_text(OTHER_MACHINE)
    ssh = tmp_path / "ssh"
    ssh.write_text(OWN_HOME.format(folder=tmp_path, home=cli.home))
    ssh.chmod(0o700)
    (tmp_path / "hosts").write_text("local\nbox1 slots=64\n")
    cli.home.mkdir()
    done = cli("doctor", "--hosts", str(tmp_path / "hosts"), "--json", TRAINFAST_SSH=str(ssh))
    assert not done.json["healthy"]
    assert done.json["link"] is None
    differs, _ = findings(done, "versions")
    assert differs[0] == "fail"
    assert differs[1].startswith("torch differs: local ")
    assert differs[1].endswith(", box1 1.2.3")
    assert findings(done, "shared home") == [("fail", f"box1 cannot see {cli.home} of this machine")]
    [(state, sentence)] = findings(done, "clock")
    assert state == "warn"
    assert sentence.startswith(("box1's clock is 125.0", "box1's clock is 124.9"))
    assert findings(done, "GPUs")[1][0] == "fail"
    assert findings(done, "GPUs")[1][1].endswith("for slots=64")
    assert list(cli.home.iterdir()) == [] or not any(path.name.startswith(".seen") for path in cli.home.iterdir())


@pytest.mark.parametrize("arguments", [["--hosts", "a b"], ["--hosts", "local", "--calibrate"]])
def test_input_that_cannot_be_used_is_refused(cli, arguments):
    assert "--hosts" in cli("doctor", *arguments).refused()


def test_nothing_is_left_of_a_doctor_that_was_killed(cli, sshd):
    started = cli.start("doctor", "--hosts", f"local,{sshd.name}", "--json", TRAINFAST_SSH=sshd.ssh)

    def ranks():
        found = psutil.process_iter(["cmdline"])
        return sum("programs/all_reduce.py" in " ".join(one.info["cmdline"] or []) for one in found)

    until(lambda: ranks() >= 4, "both torchruns and their ranks", 60)
    started.signal(signal.SIGKILL)
    started.process.wait()
    until(lambda: not agents(), "the end of all that was started", 15)
    assert json.loads(started.end().out or "{}") == {}
