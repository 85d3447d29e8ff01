"""The list of hosts, the ssh command, and the sentence for each of its faults, with a real sshd."""

import subprocess
import sys

import pytest

from trainfast_runner.errors import UserError
from trainfast_runner.machine.hosts import Host, host_argv, module_argv, parse_hosts, ssh_failure


def test_a_list_of_names_and_a_hostfile(tmp_path):
    assert parse_hosts("a, me@b.c:x") == (Host("a", None), Host("me@b.c:x", None))
    assert [host.is_local for host in parse_hosts("local,local")] == [True, True]
    (tmp_path / "hosts").write_text("# two boxes\n\nbox1 slots=4  # the large one\nlocal\nlocal slots=2\n")
    assert parse_hosts(str(tmp_path / "hosts")) == (Host("box1", 4), Host("local", None), Host("local", 2))


@pytest.mark.parametrize("text", ["", ",", "a,,b", "-oProxyCommand=x,b", "a b", "a,a", "/no/hosts", "[red]", "a;b"])
def test_a_list_that_cannot_be_used_is_refused(text):
    with pytest.raises(UserError) as refused:
        parse_hosts(text)
    assert "--hosts" in refused.value.line()


@pytest.mark.parametrize(
    ("text", "where", "allowed"),
    [
        ("a\nb slots=0", ":2: ", "a whole number from 1 on"),
        ("b slots=four", ":1: ", "a whole number from 1 on"),
        ("b gpus=4", ":1: ", "slots=N"),
        ("b slots=4 slots=5", ":1: ", "slots=N"),
        ("a\n\na slots=2", ":3: ", "slots=N"),
        ("-F/etc/x", ":1: ", "not beginning with -"),
        ("# nothing", "hosts: ", "box1 slots=4"),
    ],
)
def test_a_malformed_hostfile_is_refused_with_its_line(tmp_path, text, where, allowed):
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(UserError) as refused:
        parse_hosts(str(tmp_path / "hosts"))
    assert where in refused.value.line()
    assert allowed in refused.value.line()


def on(host, *argv):
    """Run a command on a host."""
    return subprocess.run(host_argv(Host(host, None), argv), capture_output=True, text=True, stdin=subprocess.DEVNULL)


def test_a_command_keeps_its_words_on_the_other_side(sshd, monkeypatch):
    monkeypatch.setenv("TRAINFAST_SSH", sshd.ssh)
    words = ["a b", "$HOME", "'", "é", "*"]
    for host in ("local", sshd.name, sshd.second):
        done = on(host, sys.executable, "-c", "import sys; print(ascii(sys.argv[1:]))", *words)
        assert (done.stdout, done.stderr) == (f"{words!a}\n", "")
    done = on(sshd.name, *module_argv("trainfast_runner.machine.hosts"))
    assert (done.returncode, done.stderr) == (0, "")


def test_each_fault_of_ssh_is_one_sentence(sshd, monkeypatch):
    monkeypatch.setenv("TRAINFAST_SSH", sshd.ssh)
    for host, argv, sentence in (
        ("no.such.host.invalid", ["true"], "no.such.host.invalid is unknown"),
        ("nokey", ["true"], "nokey takes no key of yours"),
        ("refused", ["true"], "refused refuses the connection"),
        ("newbox", ["true"], "the host key of newbox is not known yet"),
        ("changed", ["true"], "changed shows another host key than before"),
        (sshd.name, ["/nowhere/bin/python", "-m", "x"], f"{sshd.name} has no trainfast-tui at {sys.executable}"),
        (sshd.name, ["sh", "-c", "printf 'a\\n\\033[31m[b]no\\n' >&2; exit 3"], f"{sshd.name}: [b]no"),
        (sshd.name, ["sh", "-c", "exit 3"], f"the command on {sshd.name} ended with exit code 3"),
    ):
        done = on(host, *argv)
        text = ssh_failure(Host(host, None), done.returncode, done.stderr)
        assert text.startswith(sentence), (text, done)
        assert text.isprintable()


def test_a_dropped_connection_a_lost_ssh_and_one_that_is_no_command_have_their_sentence(monkeypatch):
    host = Host("box1", None)
    dropped = "ssh: connect to host box1 port 22: Connection timed out\r\n"
    assert "a firewall drops the connection" in ssh_failure(host, 255, dropped)
    assert ssh_failure(host, -9, "") == "the command on box1 was ended by SIGKILL"
    for command in ("'", "/nowhere/ssh -F x"):
        monkeypatch.setenv("TRAINFAST_SSH", command)
        with pytest.raises(UserError):
            host_argv(Host("box1", None), ["true"])
