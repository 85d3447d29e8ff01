"""The commands of `benchmarks/gpu.sh` on a machine with a GPU: each one exists, though none can run here."""

import functools
import itertools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from benchmarks.gpu_check import Session, judge, run_all, speed_row
from benchmarks.gpu_checks import Check, all_checks
from benchmarks.sampler_cost import stand_in
from benchmarks.several_gpus import matrix_of

from trainfast_runner.machine.devices import Machine
from trainfast_runner.records.tick import DeviceReading
from trainfast_runner.settings import compatibility
from trainfast_runner.settings.compatibility import Facts
from trainfast_runner.settings.spec import resolve
from trainfast_runner.worker.catalog import STRATEGIES
from trainfast_tui.cli import parser

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.sh"
GPU = DeviceReading(index=0, uuid="GPU-0", name="NVIDIA H200", memory_free_bytes=139 << 30, compute_capability="9.0")
GPUS = tuple(msgspec.structs.replace(GPU, index=index, uuid=f"GPU-{index}") for index in range(2))
ONE_GPU = Machine(device="cuda", gpus=GPUS[:1], nvml_gpus=GPUS[:1], cores=16)
TWO_GPUS = Machine(device="cuda", gpus=GPUS, nvml_gpus=GPUS, cores=16)
MATRIX = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPXB\t0-51\t0\t\tN/A
GPU1\tNV18\t X \tNODE\t0-51\t0\t\tN/A
NIC0\tPXB\tNODE\t X \t\t\t

Legend:

  X    = Self
"""
PACKAGES = ("torch", "transformers", "accelerate", "bitsandbytes", "torchao", "deepspeed", "flash-attn", "liger-kernel")
INSTALLED = dict.fromkeys(PACKAGES, "9.0")


@functools.cache
def listed(*arguments):
    """The lines of `-n` in their columns (lane, seconds, name, exit code, command), and the line of the sum."""
    done = subprocess.run(["bash", str(SCRIPT), "-n", *arguments], capture_output=True, text=True, check=True)
    *lines, total = done.stdout.splitlines()
    return [re.split(r"\s{2,}", line) for line in lines], total


def commands(*arguments):
    return [(name, command.split()) for _, _, name, _, command in listed(*arguments)[0]]


@pytest.mark.parametrize("groups", [(), ("first", "search", "levers", "autotune")])
def test_every_run_it_starts_is_valid_on_the_gpus_it_needs(groups):
    names = [name for name, _ in commands(*groups)]
    assert len(set(names)) == len(names), "each check has a row of its own"
    trainings = [words[1:] for _, words in commands(*groups) if words[0] == "trainfast-tui"]
    assert len(trainings) > (3 if groups else 30)
    for words in trainings:
        _, parsed = parser.parse(words)
        if words[0] not in ("run", "search") or "--" in words:
            continue
        preset = words[2] if words[0] == "search" else words[1]
        spec = resolve(preset, [value for flag, value in itertools.pairwise(words) if flag == "--set"])
        machine = ONE_GPU if spec.knobs["devices"] in (None, 1) else TWO_GPUS
        compatibility.check(Facts(spec, machine, {}, INSTALLED, sys.executable))
        assert parsed.preset == preset


def test_a_part_of_it_can_be_asked_for():
    everything = {name for name, _ in commands()}
    strategies = {name for name, _ in commands("strategy", "several")}
    assert strategies < everything
    assert everything.isdisjoint({name for name, _ in commands("first", "search", "levers", "autotune")})
    fused = ["optimizer-adamw-foreach", "optimizer-adamw-fused"]
    assert sorted(name for name, _ in commands("-k", "optimizer-adamw-f*")) == fused
    checked = {words[4] for _, words in commands("several") if words[2:4] == ["benchmarks.several_gpus", "losses"]}
    assert checked == set(STRATEGIES) - {"single"}, "every strategy of several GPUs has a check of its losses"
    done = subprocess.run(["bash", str(SCRIPT), "-n", "no-such-group"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "no group no-such-group; groups are nvml, models" in done.stderr


def test_what_runs_by_default_and_what_runs_first_end_within_ten_minutes():
    lines, total = listed()
    seconds_of = Counter()
    for lane, seconds, *_ in lines:
        if lane.startswith(("lane", "alone")):
            seconds_of[lane] += float(seconds.strip("~ s"))
    assert {f"lane {number}" for number in range(1, 7)} | {"alone"} <= set(seconds_of)
    alone_s = seconds_of.pop("alone")
    assert max(seconds_of.values()) + alone_s < 600
    assert all(float(sum_of.split()[0]) < 600 for sum_of in (total, listed("first")[1]))
    assert not all(seconds.startswith("~") for _, seconds, *_ in lines), "seconds are of committed results"


@pytest.fixture(scope="module")
def gpus(tmp_path_factory):
    """The environment of two stand-in GPUs, and of an nvidia-smi that shows their links."""
    folder = tmp_path_factory.mktemp("gpus")
    smi = folder / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\ncat <<'END'\n{MATRIX}END\n")
    smi.chmod(0o755)
    variables = stand_in(folder, gpus=2)
    return {**variables, "PATH": f"{folder}:{variables['PATH']}", "TRAINFAST_HOME": str(folder / "home")}


def start(module, *arguments, **variables):
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **variables})


@pytest.mark.parametrize("module", ["benchmarks.gpu_check", "benchmarks.plain_loop", "benchmarks.attached"])
def test_a_gpu_script_that_no_test_below_runs_starts(module):
    done = start(module, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: " in done.stdout


def test_nvml_truth_and_the_samplers_cost_run_to_their_judgement(gpus):
    done = start("benchmarks.nvml_truth", "--seconds", "0.5", **gpus)
    report = json.loads(done.stdout)
    verdicts = {what: held for what, _, _, held in report["judged"]}
    assert verdicts["load"] is False, "no torch of a GPU multiplies matrices here"
    assert verdicts["GPU 1 idle: energy beside integrated power"] is True
    assert done.returncode == 1
    done = start("benchmarks.sampler_cost", "--real", "--seconds", "1", **gpus)
    assert done.returncode in (0, 1), done.stderr
    judged = judge(CHECK, {"output": None, "lines": done.stdout.splitlines()})
    assert [what.split(",")[0] for what, *_ in judged] == ["sampler", "sampler", "telemetry.jsonl"]


@pytest.mark.parametrize(
    ("words", "code"),
    # The links of the stand-in are not those of MATRIX; trainings are two processes here.
    [("topology", 1), pytest.param("losses ddp", 0, marks=[pytest.mark.long, pytest.mark.ci])],
)
def test_a_check_of_several_gpus_runs_to_its_judgement(words, code, gpus):
    assert matrix_of(MATRIX) == [["X", "NV18"], ["NV18", "X"]], "without its other columns"
    done = start("benchmarks.several_gpus", *words.split(), **gpus)
    assert (json.loads(done.stdout)["held"], done.returncode) == (code == 0, code)


@pytest.mark.ci
def test_the_monitors_view_is_measured_in_a_terminal(gpus):
    app = ("--", sys.executable, "-m", "trainfast_tui.cli")
    done = start("benchmarks.meter", "--json", "--seconds", "1", "--key", "0.5:m", *app, **gpus)
    [view] = [each for each in all_checks() if each.name == "monitor-view"]
    assert len(judge(view, {"output": json.loads(done.stdout), "lines": []})) == len(view.bounds) == 2


CHECK = Check(name="check", group="group", arguments=())


def check(name, code, **fields):
    return Check(name=name, group="group", arguments=("-c", code), **fields)


def session_of(folder, limit_s=60.0):
    return Session(head={"device": "a GPU"}, file=folder / "results.json", limit_s=limit_s, gpus=1)


def test_checks_run_in_lanes_with_homes_of_their_own_then_alone_and_end_at_the_limit(tmp_path, capsys):
    says_home = "import json, os; print(json.dumps({'home': os.environ['TRAINFAST_HOME']}))"
    # The first six pass only while all six run: each waits for the files of the others.
    meet = (
        f"import os, pathlib, time; place = pathlib.Path({str(tmp_path)!r}); "
        "(place / f'here-{os.getpid()}').touch(); until = time.monotonic() + 60\n"
        "while len(list(place.glob('here-*'))) < 6 and time.monotonic() < until: time.sleep(0.01)\n"
        f"assert not (place / 'alone').exists() and len(list(place.glob('here-*'))) >= 6; {says_home}"
    )
    alone = f"import pathlib; (pathlib.Path({str(tmp_path)!r}) / 'alone').touch(); {says_home}"
    checks = [check(f"check-{number}", meet) for number in range(6)]
    checks += [
        check("timed", alone, alone=True),
        check("bounded", 'print(\'{"a": {"b": 7}}\')', bounds=(("a.b", "<=", 5, "ms"),)),
        check("package", "", needs="no-such-package"),
        check("several", "", gpus=2),
        check("failing", "raise SystemExit('broken')"),
    ]
    assert run_all(session_of(tmp_path), checks) == 1
    report = json.loads((tmp_path / "results.json").read_text())
    rows = {row["check"]: row for row in report["rows"]}
    assert report["ok"] is False
    assert len({rows[f"check-{number}"]["result"]["home"] for number in range(6)}) == 6
    assert (rows["timed"]["ok"], rows["timed"]["alone"], rows["check-0"]["ok"]) == (True, True, True)
    assert rows["bounded"]["judged"] == [["a.b", "7.0 ms", "<= 5 ms", False]]
    assert rows["package"]["left_out"] == "no-such-package is not installed"
    table = [re.split(r"\s{2,}", line) for line in capsys.readouterr().out.splitlines()]
    assert ["FAIL", "bounded", "a.b", "7.0 ms", "<= 5 ms"] in table
    assert ["ok", "timed"] in table
    assert ["–", "package", "left out: no-such-package is not installed"] in table
    assert ["–", "several", "left out: needs 2 GPUs, and there is 1 here"] in table
    assert ["FAIL", "failing", "exit code 1, not 0: broken"] in table
    assert run_all(session_of(tmp_path, limit_s=0.5), [check("slow", "import time; time.sleep(600)")]) == 1
    [row] = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert (row["ok"], row["exit_code"]) == (False, "timeout")


RUN = {"run_id": "r", "state": "finished", "memory": {"predicted_bytes": 104 << 20, "peak_allocated_bytes": 100 << 20}}


def test_a_run_is_judged_by_its_memory_its_end_and_its_speed_against_plain_loops():
    def verdict(predicted_bytes, *notices):
        memory = {**RUN["memory"], "predicted_bytes": predicted_bytes}
        return judge(CHECK, {"output": {**RUN, "memory": memory}, "errors": list(notices)})

    assert verdict(104 << 20) == [("predicted memory", "104 for 100 MiB (+4.00 %)", "within 3 %", False)]
    assert [held for *_, held in verdict(98 << 20)] == [True]
    reason = "memory is not predicted: the tracer cannot follow this model"
    assert verdict(None, "r is starting", reason) == [("predicted memory", reason, "within 3 %", False)]
    oom = {"run_id": "r", "state": "oom", "started_wall_ns": 100 * 10**9, "seconds": 10.0, "memory": {}}
    assert judge(CHECK, {"output": oom, "ended_s": 117.5}) == [("over after the training", "7.5 s", "<= 6 s", False)]
    rows = [
        {"check": "plain-1", "ok": True, "result": {"samples_per_s": 400.0}},
        {"check": "run-1", "ok": True, "throughput": {"samples_per_s": {"median": 380.0}}},
        {"check": "run-2", "ok": True, "throughput": {"samples_per_s": {"median": 360.0}}},
    ]
    assert speed_row(rows) is None
    assert speed_row([*rows, {**rows[0], "check": "plain-2"}]) == (
        "run against a plain loop",
        "370.0 against 400.0 samples/s (0.925)",
        ">= 0.95",
        False,
    )


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_and_does_nothing(tmp_path):
    done = subprocess.run(["bash", str(SCRIPT), "-o", str(tmp_path / "out.json")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("no GPU: ")
    assert not (tmp_path / "out.json").exists()
