"""Chaos: start small runs and searches, inject one fault into each at a random moment, and check how each ends.

    python -m benchmarks.chaos --rounds 40 --seed 1
    python -m benchmarks.chaos --only search app --rounds 8

Linux, on the CPU. As root, a full disk is among the faults, and with --uid the runs are that user's, whom modes bind.
It prints each finding and a table: steps lost, processes left, wrong states, tracebacks. Exit code 1 unless all are 0.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from itertools import permutations
from pathlib import Path
from signal import SIGCONT, SIGHUP, SIGKILL, SIGSTOP, SIGTERM, Signals
from subprocess import DEVNULL, PIPE
from typing import Any

import psutil
from benchmarks.meter import Ended, Program, app, options, print_columns

PRESET = """schema = 1
title = "chaos"
extends = "tiny-llama"
[model]
num_hidden_layers = 1
[knobs]
seq_len = 32
steps = 4
memory_limit = "100MiB"
"""
SCRIPT = """import torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(400):
    model(torch.randn(8, 64)).pow(2).mean().backward(); optimizer.step(); optimizer.zero_grad()
    print("step", step, flush=True)
"""
TINY = ["tiny-llama", "--set", "model.num_hidden_layers=1", "--set", "seq_len=32"]
RUNS = {
    "single": [*TINY, "--set", "steps=80"],
    "ddp": [*TINY, "--set", "steps=60", "--set", "devices=cpu:2", "--set", "strategy=ddp"],
    "script": ["--", sys.executable, "script.py"],
}
SEARCHES = {
    "max-batch": ["search", "max-batch", "chaos", "--json"],
    "best": ["search", "best", "chaos", "--vary", "optimizer=adamw,sgd", "--budget", "10s", "--json"],
}
APP_KEYS = {"max-batch": ["b", "\r"], "best": ["B", "t", "10s\r", "\r"]}
"""What is typed into the app to start a search, with pauses."""
EXIT_CODES = {"finished": 0, "oom": 3, "failed": 4, "failed_to_start": 4, "killed": 4, "lost": 5, "stopped": 130}
BROKEN = {"killed", "failed", "failed_to_start"}
VERBS = {"kill": SIGKILL, "term": SIGTERM, "hup": SIGHUP, "freeze": SIGSTOP}
RIGHT: dict[str, set[str]] = {
    **{f"{verb}-{role}": BROKEN for verb in ("kill", "term", "hup") for role in ("launcher", "rank")},
    **{"kill-supervisor": {"lost"}, "kill-everything": {"lost"}, "term-supervisor": {"stopped"}},
    **{"kill-training-group": BROKEN, "hup-supervisor": set(), "freeze-supervisor": set()},
    **{f"{verb}-follower": set() for verb in ("kill", "term", "hup")},
    **{"freeze-launcher": set(), "freeze-rank": set()},
}
"""The states that are right after each signal to a process, beside `finished`, which a late fault finds."""
FILES = ["delete-output", "read-only-run", "cut-steps", "garbage-steps", "cut-events", "delete-lock", "remove-home"]
COMMANDS, STOPS = ["command-kill", "command-term", "command-hup"], ["stop", "stop-now", "stop-twice"]
OF_SEARCHES = [f"{kind}-{verb}" for kind in ("search", "app", "conductor") for verb in VERBS]
FULL_DISK = "full-disk"
STANDBYS = ["standby-" + "-".join(order) for order in permutations(("app", "supervisor", "process"))]
"""SIGKILL to these in this order, before or after the key that gives the standby a run."""
WAITING_ENDS_WITHIN_S = 2.0
GARBAGE = [b'{"step": 1e999', b"\0" * 4096, b"\xff\xfe\n[[[[", b'{"step":"\x1b]52;c;eA==\x07"}\n']
ROLES = (("supervisor", "running.supervisor"), ("conductor", "trainfast_runner.search"), ("launcher", "torchrun"))
Answer = tuple[int, str, str]
"""Exit code, stdout and stderr of a command."""
KINDS = ("lost", "left", "wrong", "tracebacks")
ENDS_WITHIN_S, SEARCH_WITHIN_S = 120.0, 600.0


class Round:
    """One home, one run or search, one fault; `found` gets what is wrong."""

    def __init__(self, number: int, fault: str, chance: random.Random, uid: int, found: list[tuple[str, str]]) -> None:
        self.fault, self.chance, self.uid = fault, chance, uid
        searches = fault in OF_SEARCHES
        self.kind = chance.choice(list(SEARCHES) if searches else ["single", "single", "ddp", "script"])
        self._label, self._found = f"{number:3} {self.kind:9} {fault}", found
        self.base = Path(tempfile.mkdtemp(prefix="chaos-"))
        self.home = self.base / "home"

    def run(self) -> None:
        """Run the round, and end and count every process that it leaves."""
        print(self._label, flush=True)
        presets = self.base / ".config" / "trainfast-tui" / "presets"
        for folder in (self.home, presets):
            folder.mkdir(parents=True)
        (presets / "chaos.toml").write_text(PRESET)
        (self.base / "script.py").write_text(SCRIPT)
        if self.fault == FULL_DISK:
            size = self.chance.choice([64, 96, 160, 400])
            mount = ["mount", "-t", "tmpfs", "-o", f"size={size}k,mode=777", "none", str(self.home)]
            subprocess.run(mount, check=True)
        if self.uid:
            for path in (self.base, *self.base.rglob("*")):
                os.chown(path, self.uid, self.uid)
        try:
            of_searches = self._search if self.fault in OF_SEARCHES else self._one_run
            (self._standby if self.fault in STANDBYS else of_searches)()
        finally:
            for pid, line in self._processes():
                self._note("left", f"{pid} {line}")
                with suppress(ProcessLookupError):
                    os.kill(pid, SIGKILL)
            if self.fault == FULL_DISK:
                subprocess.run(["umount", "-l", str(self.home)], check=False)
            shutil.rmtree(self.base, ignore_errors=True)

    def _note(self, kind: str, text: str) -> None:
        self._found.append((kind, f"{self._label}: {text}"))
        print(f"    {kind}: {text}", flush=True)

    @property
    def _environment(self) -> dict[str, str]:
        own = {"TRAINFAST_HOME": str(self.home), "HOME": str(self.base), "XDG_CONFIG_HOME": str(self.base / ".config")}
        # Text is tokenized once for all rounds, but for another user, who cannot read it.
        cache = self.base / ".cache" if self.uid else Path.home() / ".cache"
        return {**os.environ, **own, "XDG_CACHE_HOME": str(cache)}

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        user: dict[str, Any] = {"user": self.uid, "group": self.uid, "extra_groups": []} if self.uid else {}
        return subprocess.Popen(
            [*app(), *words], env=self._environment, cwd=self.base, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, **user
        )

    def _ended(self, process: subprocess.Popen[bytes], words: str, within_s: float = ENDS_WITHIN_S) -> Answer:
        """Wait for a command; notes a traceback, and a wait without an end."""
        try:
            out, err = process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            self._note("wrong", f"{words} did not end within {within_s:g} s")
            process.kill()
            out, err = process.communicate()
        self._look_for_traceback(words, err.decode(errors="replace"))
        return process.returncode, out.decode(errors="replace"), err.decode(errors="replace")

    def _call(self, *words: str, within_s: float = ENDS_WITHIN_S) -> Answer:
        return self._ended(self._start(*words), " ".join(words[:2]), within_s)

    def _look_for_traceback(self, where: str, text: str) -> None:
        if "Traceback (most recent" in text:
            self._note("tracebacks", f"{where}: {text[-600:]}")

    def _processes(self) -> list[tuple[int, str]]:
        """The round's processes, by the home in their environment, with their commands."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # it has ended, or belongs to another user
                if process.environ().get("TRAINFAST_HOME") == str(self.home):
                    found.append((process.pid, " ".join(process.cmdline())[:150]))
        return found

    def _pids(self, wanted: str) -> list[int]:
        roles: dict[str, list[int]] = defaultdict(list)
        for pid, line in self._processes():
            names = (*ROLES, ("follower", app()[-1]))
            role = next((role for role, word in names if word in line.replace("distributed.run", "torchrun")), "rank")
            roles[role].append(pid)
        if wanted == "everything":
            return [pid for pids in roles.values() for pid in pids]
        return roles["launcher"] or roles["rank"] if wanted in ("launcher", "training-group") else roles[wanted]

    def _signal(self, number: Signals, role: str) -> None:
        pids = self._pids(role)
        for pid in [self.chance.choice(pids)] if role == "rank" and pids else pids:
            with suppress(OSError):
                (os.killpg if role == "training-group" else os.kill)(pid, number)
                if number == SIGSTOP:
                    time.sleep(self.chance.uniform(0.5, 4))
                    os.kill(pid, SIGCONT)

    def _inject(self, directory: Path) -> set[str]:
        """Inject the fault into the run; return the states that are right after it."""
        verb, _, role = self.fault.partition("-")
        steps = directory / "steps.jsonl"
        if self.fault in RIGHT:
            self._signal(VERBS[verb], role)
            return RIGHT[self.fault] | {"finished"}
        if self.fault in STOPS:
            for _ in range(2 if role == "twice" else 1):
                self._call("stop", directory.name, *(["--now"] if role == "now" else []))
            return {"finished", "stopped", "killed"}
        if self.fault == "remove-home":
            shutil.rmtree(self.home, ignore_errors=True)
        elif verb == "delete":
            (directory / ("output.log" if role == "output" else "alive.lock")).unlink(missing_ok=True)
        elif self.fault == "read-only-run":
            directory.chmod(0o500)
            return {"finished", "lost", "failed", "failed_to_start"}
        elif self.fault == "cut-steps" and steps.exists():
            os.truncate(steps, self.chance.randrange(steps.stat().st_size + 1))
        elif self.fault in ("garbage-steps", "cut-events"):
            path = steps if verb == "garbage" else directory / "events.jsonl"
            if path.exists():
                with path.open("ab") as file:
                    file.write(self.chance.choice(GARBAGE))
        return {"finished", "lost"} if self.fault in ("cut-events", "delete-lock") else {"finished"}

    def _one_run(self) -> None:
        process = self._start("run", "--detach", *RUNS[self.kind])
        of_command = self.fault in COMMANDS
        if of_command:
            time.sleep(self.chance.uniform(0.2, 8))
            process.send_signal(VERBS[self.fault.partition("-")[2]])
        code, _, err = self._ended(process, "run --detach")
        if code != 0 and not of_command and not (self.fault == FULL_DISK and code == 4):
            self._note("wrong", f"run --detach: exit code {code}: {err[-300:]}")
        directory = next(iter(self._run_directories()), None)
        follower, states, before = None, {"finished", "lost", "failed", "failed_to_start"}, 0
        if directory and not of_command and self.fault != FULL_DISK:
            if "follower" in self.fault or self.chance.random() < 0.5:
                follower = self._start("attach", directory.name, "--json")
            time.sleep(self.chance.uniform(0, 14 if self.kind == "ddp" else 8))
            before = _steps_in(directory)
            states = self._inject(directory)
        self._wait_until(lambda: not set(self._pids("everything")) - set(self._pids("follower")))
        if follower is not None:
            code, _, err = self._ended(follower, "attach", 30)
            if code not in (*EXIT_CODES.values(), 2, 129, -9, -15, -1):
                self._note("wrong", f"attach: exit code {code}: {err[-300:]}")
        for run in self._run_directories():
            self._check_steps(run, before, self._check_state(run, states))
        self._check_commands(directory.name if directory else "20200101-000000-none-0000")

    def _check_steps(self, directory: Path, before: int, state: str | None) -> None:
        if self.fault in ("cut-steps", "garbage-steps"):
            return
        asked = 80 if state == "finished" and self.kind == "single" and self.fault not in (FULL_DISK, "stop") else 0
        after = _steps_in(directory)
        if after < max(before, asked):
            self._note("lost", f"{before} steps before the fault, {after} after the end ({state}), {asked} asked for")

    def _standby(self) -> None:
        """Kill the app, the supervisor that waits with a standby, and the standby, in this order."""
        with suppress(Ended), Program([*app(), "--preset", "chaos"], env=self._environment, cwd=self.base) as screen:
            screen.read(time.monotonic() + self.chance.uniform(4, 16))
            pids = {"app": [screen.pid], "supervisor": self._pids("supervisor"), "process": self._pids("rank")}
            if self.chance.random() < 0.6:
                screen.read(time.monotonic() + self.chance.uniform(0.1, 6), [(0.0, "r")])
            for role in self.fault.split("-")[1:]:
                for pid in pids[role]:
                    with suppress(ProcessLookupError):
                        os.kill(pid, SIGKILL)
                time.sleep(self.chance.uniform(0, 0.3))
        time.sleep(WAITING_ENDS_WITHIN_S)
        for pid, line in self._processes():
            # A process that has its run reads nothing any more.
            with suppress(OSError):
                if "standby" in line and os.readlink(f"/proc/{pid}/fd/0") != os.devnull:
                    self._note("left", f"still waits: {pid} {line}")
        self._wait_until(lambda: not self._processes(), ENDS_WITHIN_S)
        for directory in self._run_directories():
            self._check_state(directory, {"finished", "lost", "failed", "failed_to_start", "killed"})

    def _search(self) -> None:
        """Interrupt a search of the command line, the app or its conductor; then continue it to its answer."""
        target, _, verb = self.fault.partition("-")
        number = VERBS[verb]
        words = SEARCHES[self.kind]
        if target == "search":
            process = self._start(*words)
            time.sleep(self.chance.uniform(1, 25))
            process.send_signal(number)
            time.sleep(4 if number == SIGSTOP else 0)
            process.send_signal(SIGCONT)
            code, _, err = self._ended(process, self.fault, SEARCH_WITHIN_S)
            if code not in {0, -number, 130 if number in (SIGTERM, SIGHUP) else 0}:
                self._note("wrong", f"exit code {code}: {err[-300:]}")
        else:
            with Program([*app(), "--preset", "chaos"], env=self._environment, cwd=self.base) as screen:
                self._search_in_app(screen, target, number)
        self._wait_until(lambda: not self._processes(), SEARCH_WITHIN_S)
        for log in (*self.home.glob("searches/*/conductor.log"), *self.home.glob("runs/*/supervisor.log")):
            self._look_for_traceback(log.name, log.read_text(errors="replace"))
        code, out, err = self._call(*words, within_s=SEARCH_WITHIN_S)
        if code or '"state":"answered"' not in out:
            self._note("wrong", f"continued: exit code {code}: {err[-200:]}{out[-200:]}")
        for directory in self._run_directories():
            self._check_state(directory, set(EXIT_CODES))
        self._check_commands(self._run_directories()[-1].name)

    def _search_in_app(self, screen: Program, target: str, number: Signals) -> None:
        """Start the search by its key; signal the app or the conductor, and leave the screen."""
        with suppress(Ended):
            screen.read(time.monotonic() + 5)
            for keys in APP_KEYS[self.kind]:
                screen.read(time.monotonic() + 3, [(time.monotonic(), keys)])
            deadline_s = time.monotonic() + ENDS_WITHIN_S
            while not list(self.home.glob("searches/*/journal.jsonl")):
                if time.monotonic() > deadline_s:
                    self._note("wrong", f"the app started no search: {screen.tail[-300:]!r}")
                    return
                screen.read(time.monotonic() + 0.5)
            screen.read(time.monotonic() + self.chance.uniform(0, 20))
            if target == "conductor":
                self._signal(number, target)
            else:
                screen.signal(number)
                time.sleep(4 if number == SIGSTOP else 0)
                screen.signal(SIGCONT)
            screen.read(time.monotonic() + 5)
        self._look_for_traceback("the app", screen.tail.decode(errors="replace"))

    def _run_directories(self) -> list[Path]:
        return sorted((self.home / "runs").glob("*")) if (self.home / "runs").is_dir() else []

    def _wait_until(self, is_over: Callable[[], bool], within_s: float = 60.0) -> None:
        deadline_s = time.monotonic() + within_s
        while not is_over() and time.monotonic() < deadline_s:
            time.sleep(0.3)

    def _check_state(self, directory: Path, states: set[str]) -> str | None:
        """The state that `runs show` tells, which is to be one of these."""
        code, out, err = self._call("runs", "show", directory.name, "--json")
        state: str | None = json.loads(out.splitlines()[-1]).get("state") if out.strip() else None
        if state not in states:
            self._note("wrong", f"{state} (exit {code}), not one of {sorted(states)}: {err[-200:]}{out[:300]}")
        log = directory / "supervisor.log"
        if log.exists():
            self._look_for_traceback(log.name, log.read_text(errors="replace"))
        return state

    def _check_commands(self, run: str) -> None:
        """Every reading command ends with a known code, and with one line where it refuses."""
        report = f"report {run} -o {self.base}/r.html"
        for line in ("runs list", "runs list --json", f"runs compare {run} {run}", f"logs {run} -n 3", f"attach {run}",
                     report, f"export {run} --to command", f"stop {run}", f"runs show {run} --why"):  # fmt: skip
            words = line.split()
            code, _, err = self._call(*words)
            if code not in (0, 2, 3, 4, 5, 130) or (code and words[0] != "attach" and len(err.splitlines()) != 1):
                self._note("wrong", f"{' '.join(words[:2])}: exit code {code}: {err[:300]}")


def _steps_in(directory: Path) -> int:
    path = directory / "steps.jsonl"
    return path.read_bytes().count(b'"step"') if path.exists() else 0


def main() -> int:
    """Run the rounds and print what was found."""
    # Of --only, words of which a fault's name holds one; --uid is the user of the commands (root alone can choose one).
    asked = options(__doc__, rounds=40, seed=1, uid=0, only=[]).parse_args()
    names = [*RIGHT, *FILES, *COMMANDS, *STOPS, *OF_SEARCHES, *STANDBYS, *([FULL_DISK] if os.geteuid() == 0 else [])]
    faults = [name for name in names if any(word in name for word in asked.only or [""])]
    chance, found = random.Random(asked.seed), list[tuple[str, str]]()
    for number in range(asked.rounds):
        if number % len(faults) == 0:
            chance.shuffle(faults)
        Round(number, faults[number % len(faults)], chance, asked.uid, found).run()
    counts = Counter(kind for kind, _ in found)
    print_columns([*found, ("", "")])
    print_columns([("rounds", *KINDS), [str(figure) for figure in (asked.rounds, *(counts[kind] for kind in KINDS))]])
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
