"""Runs on two nodes of this machine (`local,local`): what ran, and how each fault ends."""

import os
import re
import signal
import socket
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from cli.command import SMALL, until
from trainfast_runner.errors import UserError
from trainfast_runner.machine.hosts import Host
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_directory import read_result
from trainfast_runner.records.tick import DeviceReading
from trainfast_runner.running import placing

DDP = [*SMALL, "--set", "strategy=ddp"]
NAMED_WITHIN_S = 15.0
"""The promise: a fault has a named outcome within this."""


def result_of(cli, *words):
    done = cli("run", "tiny-llama", *DDP, *words, "--json")
    assert done.code == 0, done.err
    return done.json


def test_two_nodes_train_as_one_device_with_the_batches_of_both(cli):
    apart = result_of(cli, "--hosts", "local,local", "--set", "steps=6")
    alone = "strategy=single", "devices=cpu", "batch_size=4", "steps=6"
    together = result_of(cli, *(word for setting in alone for word in ("--set", setting)))
    assert apart["actual"]["nodes"] == 2
    assert together["actual"]["nodes"] == 1
    assert (apart["actual"]["world_size"], apart["loss"]) == (2, pytest.approx(together["loss"], rel=1e-6))
    # The other node's ranks are no stranger's.
    assert apart["conditions"]["others_cpu_percent"] is None


class Live:
    """A live run of two nodes, and its processes."""

    def __init__(self, directory):
        self.directory = directory

    def processes(self):
        """The supervisors, agents and ranks of both nodes, by name and node."""
        found = {}
        for process in psutil.process_iter():
            try:
                words, variables = process.cmdline(), process.environ()
            except psutil.Error:
                continue
            if str(self.directory) not in words or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if "--node" in words:
                found[f"supervisor {words[words.index('--node') + 1]}"] = process
            elif "torch.distributed.run" in words:
                found[f"agent {variables.get('TRAINFAST_NODE')}"] = process
            else:
                found[f"rank of node {variables.get('TRAINFAST_NODE')}"] = process
        return found

    def await_(self, condition, within_s):
        began_s = time.monotonic()
        while not condition():
            assert time.monotonic() < began_s + within_s, sorted(self.processes())
            time.sleep(0.1)
        return time.monotonic() - began_s

    def result(self):
        """The result, once it is there within the promise and nothing is left."""
        self.await_(lambda: read_result(self.directory) is not None and not self.processes(), NAMED_WITHIN_S)
        result = read_result(self.directory)
        assert result is not None
        return result


@contextmanager
def live_run(cli, hosts):
    """A run on these hosts once it trains."""
    done = cli("run", "tiny-llama", "--hosts", hosts, *DDP, "--set", "steps=100000", "--detach")
    assert done.code == 0, done.err
    run = Live(Home(cli.home).directory(done.out.split()[-1]))
    try:
        run.await_(lambda: (run.directory / "steps.jsonl").exists(), 60)
        yield run
    finally:
        for process in run.processes().values():
            process.send_signal(signal.SIGKILL)


FAULTS = {
    "rank of node 0": ("failed", "rank"),
    "rank of node 1": ("failed", "rank"),
    "agent 0": ("killed", "torchrun on node 0 (local) died of SIGKILL"),
    "agent 1": ("killed", "torchrun on node 1 (local) died of SIGKILL"),
    "supervisor 0": ("lost", "node 0 (local) is lost: its supervisor"),
    "supervisor 1": ("lost", "node 1 (local) is lost: its supervisor"),
}


@pytest.mark.parametrize(
    "victim",
    # A rank of node 0 ends the run as one of node 1 does.
    [pytest.param(name, marks=pytest.mark.long) if name == "rank of node 0" else name for name in FAULTS],
)
def test_a_killed_process_has_a_named_outcome_and_leaves_nothing(cli, victim):
    with live_run(cli, "local,local") as run:
        processes = run.processes()
        assert set(processes) == set(FAULTS)
        processes[victim].send_signal(signal.SIGKILL)
        result = run.result()
    state, reason = FAULTS[victim]
    assert (result.state, reason in (result.reason or "")) == (state, True), result.reason


@pytest.fixture
def ssh(sshd, monkeypatch):
    monkeypatch.setenv("TRAINFAST_SSH", sshd.ssh)
    return sshd


def test_a_run_over_ssh_outlives_its_connections_and_stop_ends_every_node(cli, ssh):
    with live_run(cli, f"local,{ssh.name}") as run:
        assert not psutil.Process(ssh.pid).children(recursive=True)  # nothing holds the connection
        assert cli("stop", run.directory.name).code == 0
        result = run.result()
        assert (result.state, result.actual and result.actual.nodes) == ("stopped", 2)


def test_ssh_killed_while_it_places_a_node_is_named_and_leaves_nothing(cli, ssh, tmp_path):
    # An ssh that is killed with its session as soon as it places a supervisor.
    killed = tmp_path / "killed-ssh"
    killed.write_text(f'#!/bin/sh\ncase "$*" in *supervisor*) kill -9 $$;; esac\nexec {ssh.ssh} "$@"\n')
    killed.chmod(0o755)
    done = cli("run", "tiny-llama", "--hosts", f"local,{ssh.name}", *DDP, "--detach", TRAINFAST_SSH=str(killed))
    assert done.code == 4
    assert "its supervisor did not start" in done.err
    assert "SIGKILL" in done.err
    run = Live(Home(cli.home).directory(Home(cli.home).run_ids()[-1]))
    assert run.result().state in ("failed_to_start", "lost")


@pytest.mark.parametrize(
    ("hosts", "words"), [("local,nowhere.invalid", "is unknown"), ("local,-oProxyCommand=x", "is not a host name")]
)
def test_a_host_that_cannot_take_part_is_refused(cli, hosts, words):
    assert words in cli("run", "tiny-llama", *DDP, "--hosts", hosts).refused()
    assert not Home(cli.home).run_ids()


UNLIKE = {
    "another torch": ("", """s/"torch":"[^"]*"/"torch":"1.2.3"/""", ["torch 1.2.3 there", "cannot train together"]),
    "another home": ("", """s/"nonce":"[^"]*"/"nonce":""/""", ["is not the same folder there", "TRAINFAST_HOME"]),
    "another time": (
        "import time; now = time.time_ns; time.time_ns = lambda: now() + 120 * 10**9",
        "",
        ["its clock is 1", "s off from this machine's", "NTP on both"],
    ),
}
"""The host's Python start, the change of its answer by sed, and the words of the refusal."""


@pytest.fixture
def stand_in_ssh(tmp_path):
    """The variable of an ssh to this machine, with another start of Python, a changed answer and ssh's variable."""

    def variable(start, change="", connection=""):
        (tmp_path / "sitecustomize.py").write_text(start)
        ssh = tmp_path / "ssh"
        exports = f"export PYTHONPATH={tmp_path} SSH_CONNECTION='{connection}'"
        ssh.write_text(f"#!/bin/sh\nfor command; do :; done\n{exports}\nsh -c \"$command\" | sed '{change}'\n")
        ssh.chmod(0o755)
        return {"TRAINFAST_SSH": str(ssh)}

    return variable


@pytest.mark.parametrize("difference", UNLIKE)
def test_a_host_unlike_the_others_is_refused_before_anything_starts(cli, stand_in_ssh, difference):
    start, change, words = UNLIKE[difference]
    line = cli("run", "tiny-llama", *DDP, "--hosts", "local,box1", **stand_in_ssh(start, change)).refused()
    assert all(part in line for part in ["host box1: ", *words]), line
    assert not Home(cli.home).run_ids()


@pytest.mark.parametrize("gpus", [4, 0])
def test_a_node_of_fewer_gpus_than_slots_is_refused(tmp_path, monkeypatch, gpus):
    def facts(request, count=8):
        readings = [DeviceReading(index=index, uuid=f"GPU-{index}") for index in range(count)]
        return placing.HostFacts("here", "boot", 0, Path(request.nonce).read_text(), {"torch": "2"}, readings)

    monkeypatch.setattr(placing, "host_facts", facts)
    monkeypatch.setattr(placing, "_ask", lambda host, request: (facts(request, gpus), 0.0))
    with pytest.raises(UserError, match=f"host box1: .* slots?, but it has {gpus} GPUs") as refused:
        placing.place((Host("local", 2), Host("box1", 8 if gpus else None)), None, "python", Home(tmp_path))
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(("name", "words"), [("nokey", "takes no key of yours"), ("refused", "refuses the connection")])
def test_a_host_that_ssh_does_not_reach_is_refused(cli, ssh, name, words):
    assert f"{name} {words}" in cli("run", "tiny-llama", *DDP, "--hosts", f"local,{name}").refused()
    assert not Home(cli.home).run_ids()


DROPPED = """
import socket
def create_connection(*words, **named):
    raise TimeoutError("timed out")
socket.create_connection = create_connection
"""
"""The Python of a machine whose packets a firewall drops."""


def test_a_firewall_is_named_before_the_run_and_at_start(cli, stand_in_ssh):
    words = "run", "tiny-llama", *DDP, "--hosts", "local,box1"
    line = cli(*words, **stand_in_ssh(DROPPED, connection="127.0.0.1 1 127.0.0.1 22")).refused()
    assert "host box1: it cannot reach 127.0.0.1 port " in line
    assert "no answer: a firewall?" in line
    assert not Home(cli.home).run_ids()
    # Without an address in ssh's variable only the supervisors find it.
    done = cli(*words, **stand_in_ssh(DROPPED))
    assert done.code == 4
    assert "failed to start: node 1 (box1) cannot reach 127.0.0.1 port " in done.out
    run = Live(Home(cli.home).directory(Home(cli.home).run_ids()[-1]))
    assert run.result().state == "failed_to_start"


WAITING = """
import os, sys, time
if "torch.distributed.run" in sys.orig_argv and os.environ.get("TRAINFAST_NODE") == "0":
    [endpoint] = [word for word in sys.orig_argv if word.startswith("--rdzv-endpoint=")]
    with open("{folder}/port.new", "w") as file:
        file.write(endpoint.rpartition(":")[2])
    os.rename("{folder}/port.new", "{folder}/port")
    while not os.path.exists("{folder}/taken"):
        time.sleep(0.01)
"""
"""A Python in which node 0's torchrun waits before it starts."""


def test_the_port_is_kept_for_torchrun_and_who_takes_it_by_force_is_named(cli, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WAITING.format(folder=tmp_path))
    started = cli.start("run", "tiny-llama", *DDP, "--hosts", "local,local", PYTHONPATH=str(tmp_path))
    until((tmp_path / "port").exists, "torchrun on node 0", 60)
    port = int((tmp_path / "port").read_text())
    with socket.socket() as polite, pytest.raises(OSError, match="in use"):
        polite.bind(("127.0.0.1", port))
    with socket.create_server(("127.0.0.1", port)):  # it reuses addresses, and asks for this very one
        (tmp_path / "taken").touch()
        done = started.end()
    assert done.code == 4
    words = rf"failed to start: \S+ \(process {os.getpid()}\) took port {port} before torchrun on node 0: run it again"
    assert re.search(words, done.out), done.out
    run = Live(Home(cli.home).directory(Home(cli.home).run_ids()[-1]))
    assert run.result().state == "failed_to_start"


VARIED = [*DDP, "--hosts", "local,local", "--vary", "batch_size=2,4", "--vary", "strategy=single,ddp"]


def test_every_candidate_of_a_search_is_a_run_on_all_nodes(cli):
    space = cli("search", "best", "tiny-llama", *VARIED, "--global-batch", "8", "--dry-run", "--json").json
    assert (space["candidates"], space["legal"], space["global_batch"]) == (4, 2, 8)
    line = cli("search", "max-batch", "tiny-llama", "--hosts", "local,local").refused()
    assert "strategy=single trains on one device: it has no run on several nodes" in line


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        ["max-batch", "tiny-llama", *DDP, "--hosts", "local,local", "--set", "memory_limit=100MiB", "--proof-steps=2"],
        ["best", "tiny-llama", *VARIED, "--global-batch", "8", "--budget", "60s"],
    ],
)
def test_a_search_tries_and_confirms_on_all_nodes(cli, words):
    done = cli("search", *words, "--json")
    assert done.code == 0, done.err
    home = Home(cli.home)
    results = [read_result(home.directory(run_id)) for run_id in home.run_ids()]
    assert {result and result.actual and result.actual.nodes for result in results} == {2}
    if words[0] == "max-batch":
        assert {probe["outcome"] for probe in done.json["probes"]} == {"fits", "oom"}
        assert done.json["proof_run_id"] in home.run_ids()
    else:
        assert done.json["best"]["knobs"]["strategy"] == "ddp"
        assert not [trial for trial in done.json["trials"] if "shared the CPU" in trial["reason"]]
