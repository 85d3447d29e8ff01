"""`monitor --hosts`: this machine and one behind a real sshd, hosts that fail, and the end of all children."""

import json
import os
import signal
import stat
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from cli.command import COMMAND, until
from end_to_end.terminal import Terminal, needs_tmux


def monitors_of(marker):
    """The pids of all monitors, children and remote ones, that were started with this interval."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any(marker in word for word in words) and "--hosts" not in words:
            found.append(process.pid)
    return found


def test_each_host_has_its_readings_or_its_reason(cli, sshd):
    done = cli("monitor", "--hosts", f"local,{sshd.name},refused", "--once", "--json", TRAINFAST_SSH=sshd.ssh)
    assert done.code == 0, done.err
    hosts, missing = done.json["hosts"], done.json["missing"]
    assert set(hosts) == {"local", sshd.name, "refused"}
    for name in ("local", sshd.name):
        assert set(hosts[name]) >= {"schema", "t_ns", "host", "devices", "missing"}
        assert hosts[name]["host"]["memory_total_bytes"] == psutil.virtual_memory().total
    assert hosts["refused"] is None
    assert set(missing) == {"refused"}
    assert missing["refused"].startswith("refused refuses the connection")
    lines = cli("monitor", "--hosts", f"local,{sshd.name},refused", "--once", TRAINFAST_SSH=sshd.ssh).out.splitlines()
    rows, no_gpu = [line.split()[:2] for line in lines[:-1]], lines[-1]
    assert rows == [["local", "CPU"], [sshd.name, "CPU"], ["refused", "refused"]]
    assert no_gpu.startswith(f"no GPU on local, on {sshd.name}: no NVIDIA driver here")


def test_devices_are_named_after_their_host(cli, nvml_library):
    done = cli("monitor", "--hosts", "local,local", "--once", LD_LIBRARY_PATH=str(nvml_library), NVML_STAND_IN_GPUS="2")
    assert [line.split()[0] for line in done.out.splitlines()] == ["local", "local:0", "local:1"]


@needs_tmux
def test_the_screen_is_that_of_monitor_with_a_column_of_hosts(cli, sshd, nvml_library, tmp_path):
    environment = {"TRAINFAST_SSH": sshd.ssh, "LD_LIBRARY_PATH": str(nvml_library), "NVML_STAND_IN_GPUS": "24"}
    interval = "0.3222"
    with closing(Terminal(tmp_path, 80, 24, {**cli.environment, **environment})) as terminal:
        terminal.open([*COMMAND, "monitor", f"--interval={interval}", "--hosts", "refused,local,local"])
        lines = terminal.until_shows("next try comes after", "local:17", "more lines", seconds=30).splitlines()
        assert lines[0].startswith("refused  refused refuses the connection")
        first = next(number for number, line in enumerate(lines) if line.startswith("local    CPU"))
        assert lines[first + 1].split()[:3] == ["local:0", "GPU", "0"]
        assert lines[22].endswith("more lines: they need a taller terminal")
        terminal.press("C-c")
        terminal.until_shows("ended with 130", seconds=10)
    until(lambda: not monitors_of(interval), "the end of all children", 10)


def test_no_host_at_all_is_exit_code_4(cli, sshd):
    done = cli("monitor", "--hosts", "nokey", "--once", "--json", TRAINFAST_SSH=sshd.ssh)
    assert done.code == 4
    assert done.json["missing"]["nokey"].startswith("nokey takes no key of yours")


@pytest.mark.parametrize("hosts", ["", "-oX=y", "a,a", "/nowhere/hosts"])
def test_a_list_that_cannot_be_used_is_refused(cli, hosts):
    assert "--hosts" in cli("monitor", f"--hosts={hosts}", "--once").refused()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_all_children_end_with_the_command(cli, sshd, number):
    interval = f"0.{3000 + number}"
    hosts = f"local,{sshd.name}"
    started = cli.start("monitor", "--json", "--interval", interval, "--hosts", hosts, TRAINFAST_SSH=sshd.ssh)
    assert started.process.stdout is not None
    both = False
    while not both:
        both = all(json.loads(started.process.stdout.readline())["hosts"].values())
    # The local child, the ssh, and the monitor behind it.
    assert len(monitors_of(interval)) >= 3
    started.signal(number)
    started.end()
    until(lambda: not monitors_of(interval), "the end of all children", 10)


def test_a_host_that_was_gone_is_followed_again(cli, sshd):
    interval = "0.3111"
    started = cli.start("monitor", "--json", f"--interval={interval}", "--hosts", sshd.name, TRAINFAST_SSH=sshd.ssh)
    assert started.process.stdout is not None

    def next_with(value):
        assert started.process.stdout is not None
        while bool((line := json.loads(started.process.stdout.readline()))["hosts"][sshd.name]) is not value:
            pass
        return line

    next_with(True)
    for pid in monitors_of(interval):
        if "ssh" in Path(f"/proc/{pid}/comm").read_text():
            os.kill(pid, signal.SIGKILL)
    gone = next_with(False)["missing"][sshd.name]
    assert gone.startswith(f"the command on {sshd.name} was ended by SIGKILL; the next try comes after 1 s")
    next_with(True)
    started.signal(signal.SIGTERM)
    started.end()
    until(lambda: not monitors_of(interval), "the end of all children", 10)


def test_a_silent_host_is_named_and_tried_again(cli, tmp_path, monkeypatch, capsys):
    """An ssh whose connection hangs after a while prints nothing and does not end."""
    from trainfast_runner.machine.hosts import Host
    from trainfast_tui.cli import monitor_hosts

    ssh = tmp_path / "hanging-ssh"
    ssh.write_text("#!/bin/sh\nexec sleep 1000\n")
    ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("TRAINFAST_SSH", str(ssh))
    monkeypatch.setattr(monitor_hosts, "SILENT_S", 0.2)
    monkeypatch.setattr(monitor_hosts, "FIRST_PAUSE_S", 0.05)
    one = monitor_hosts.HostMonitor(Host("box1", None), 0.05)
    one.start()
    try:
        until(lambda: one.end_if_silent() or one.reading.failure, "silence", 10)
        assert one.reading.failure is not None
        assert one.reading.failure.startswith("box1 is silent: no reading for 0 s; the next try comes after 0.05 s")
    finally:
        one.stop()
        one.join(0.0)
