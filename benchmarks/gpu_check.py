"""Run the checks of `gpu.sh`: side by side in lanes where nothing is timed, then alone; one table, one JSON file.

Each check has an empty home of its own, so that no earlier run corrects a prediction. The file has the
device, the driver, the versions and one row a check; the newest row of a check in `results/` tells its expected time.
"""

import argparse
import contextlib
import fnmatch
import importlib.metadata
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

from benchmarks.gpu_checks import APART, HERE, SPEED, Check, all_checks
from benchmarks.meter import Json, Row, at_most, print_columns

from trainfast_runner.machine.devices import Machine, detect_machine
from trainfast_runner.machine.warm_python import torch_build

RESULTS = HERE / "results"
LANES = 6
ALONE = "alone"
PACKAGES = ("torch", "transformers", "accelerate", "bitsandbytes", "deepspeed", "nvidia-ml-py", "textual")
KEPT = (
    *("preset", "state", "reason", "seconds", "changed", "actual", "steps", "throughput", "step_ms", "flops", "memory"),
    *("energy", "throttle", "compile", "diagnosis", "conditions"),
)
"""Fields of a run's result that its row keeps; a row has the whole answer of another command."""
TAIL_LINES = 40
LADDER_S = 20.0
"""After the limit: SIGINT, which is the first Ctrl-C of a run, then SIGINT again, which kills it, then SIGKILL."""
MEMORY_WITHIN_PERCENT = 3.0
AFTER_OOM_S = 6.0
SPEED_AT_LEAST = 0.95


@dataclass
class Session:
    """One call of `gpu.sh`: where its rows go, and what ends it early."""

    head: Json
    file: Path
    limit_s: float
    gpus: int
    rows: list[Json] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, check: Check) -> None:
        """Run a check, keep its row, write the file, report progress."""
        if self.stopped.is_set():
            return
        row = run_check(self, check)
        with self.lock:
            self.rows.append(row)
            self.write()
        print(f"{_verdict(row):4} {row.get('wall_seconds', 0):5.0f} s  {row['check']}", file=sys.stderr, flush=True)

    def write(self) -> None:
        """Write the file whole, one row a line: a machine that is taken away leaves what was checked so far."""
        rows = ",\n  ".join(json.dumps(row) for row in self.rows)
        temporary = self.file.with_suffix(".part")
        temporary.write_text(f'{{{json.dumps(self.head)[1:-1]},\n "rows": [\n  {rows}\n ]}}\n')
        temporary.replace(self.file)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    checks = list(all_checks())
    groups = list(dict.fromkeys(check.group for check in checks))
    parser = argparse.ArgumentParser(prog="gpu.sh", description="Checks that need a GPU.")
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"{', '.join(groups)}; by default all but {APART}")
    parser.add_argument("-n", action="store_true", help="list the checks: lane, expected seconds, exit code, command")
    parser.add_argument("-o", metavar="FILE", type=Path, help="the JSON file (results/DEVICE-DATE.json)")
    parser.add_argument("-l", metavar="SECONDS", type=float, default=300.0, help="the longest of one check (300)")
    parser.add_argument("-k", metavar="PATTERN", default="*", help="only checks whose names match, as 'precision-*'")
    options = parser.parse_args(arguments)
    if unknown := set(options.groups) - set(groups):
        parser.error(f"no group {', '.join(sorted(unknown))}; groups are {', '.join(groups)}")
    wanted = options.groups or [group for group in groups if group not in APART]
    chosen = [check for check in checks if check.group in wanted and fnmatch.fnmatch(check.name, options.k)]
    if options.n:
        print_plan(plan(chosen, recorded := recorded_seconds(), gpus=1), recorded)
        return 0
    machine = detect_machine(torch_build(sys.executable))
    if machine.refusal is not None or not machine.gpus:
        print(f"no GPU: {machine.refusal or machine.no_gpu_reason}", file=sys.stderr)
        return 2
    head = describe(machine)
    file = options.o or RESULTS / f"{re.sub(r'[^A-Za-z0-9.]+', '-', head['device'])}-{head['date']}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    return run_all(Session(head, file.resolve(), options.l, len(machine.gpus)), chosen)


def run_all(session: Session, checks: Sequence[Check]) -> int:
    """Run the lanes, then the checks alone; print the table. Ctrl-C and SIGTERM end what runs, and still print it."""
    began_s = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    in_lanes = [check for _, check, _ in plan(checks, recorded_seconds(), session.gpus) if not check.alone]
    with ThreadPoolExecutor(LANES) as lanes:
        try:
            list(lanes.map(session.run, in_lanes))
            for check in checks:
                if check.alone:
                    session.run(check)
        except KeyboardInterrupt:
            session.stopped.set()
    session.head["seconds"] = round(time.monotonic() - began_s, 1)
    if (speed := speed_row(session.rows)) is not None:
        session.rows.append({"check": "speed", "alone": True, "ok": speed[-1], "judged": [speed]})
    done = {row["check"] for row in session.rows}
    not_run = [check.name for check in checks if check.name not in done]
    session.head["ok"] = all(row["ok"] for row in session.rows) and not not_run
    session.write()
    print_table(session, not_run)
    return 0 if session.head["ok"] else 1


def run_check(session: Session, check: Check) -> Json:
    """Run one check in an empty home; return its row."""
    row: Json = {"check": check.name, "command": check.words, "alone": check.alone}
    if check.needs and version(check.needs) is None:
        return row | {"ok": True, "left_out": f"{check.needs} is not installed"}
    if session.gpus < check.gpus:
        here = "is 1" if session.gpus == 1 else f"are {session.gpus}"
        return row | {"ok": True, "left_out": f"needs {check.gpus} GPUs, and there {here} here"}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        report = run([sys.executable, *check.arguments], session.limit_s, {"TRAINFAST_HOME": home}, session.stopped)
    refused = ((report["output"] or {}).get("error") or {}).get("message")
    if check.may_refuse and refused:
        return row | {"ok": True, "left_out": refused, "wall_seconds": report["wall_seconds"]}
    judged = judge(check, report)
    held = report["exit_code"] == check.expect and all(held for *_, held in judged)
    row |= {"ok": held, "exit_code": report["exit_code"], "wall_seconds": report["wall_seconds"], "judged": judged}
    output = report["output"]
    if output is None:
        row["lines"] = report["lines"]
    else:
        row |= {name: output[name] for name in KEPT if name in output} if "run_id" in output else {"result": output}
    if report["exit_code"] != check.expect:
        output = output or {}
        message = (output.get("error") or {}).get("message") or output.get("reason") or "".join(report["errors"][-1:])
        row["error"] = f"exit code {report['exit_code']}, not {check.expect}: {str(message)[:200]}"
    return row


def judge(check: Check, report: Json) -> list[Row]:
    """The figures of a check beside their bounds, by what its command printed."""
    output = report["output"]
    if output is None:
        # Lines of `meter.print_table`.
        cells = [re.split(r"\s{2,}", line) for line in report["lines"]]
        budgets = [row for row in cells if len(row) == 4 and row[3] in ("held", "NOT HELD")]
        return [(what, text, bound, held == "held") for what, text, bound, held in budgets]
    rows: list[Row] = [tuple(row) for row in output.get("judged", ())]
    for path, sign, bound, unit in check.bounds:
        value: Any = output
        for name in path.split("."):
            value = (value or {}).get(name)
        value = len(value) if isinstance(value, list) else value
        held = value is not None and (value <= bound if sign == "<=" else value >= bound)
        rows.append((path, "absent" if value is None else f"{value:,.1f} {unit}", f"{sign} {bound:g} {unit}", held))
    is_of_preset = "run_id" in output and "--" not in check.arguments
    if is_of_preset and output["state"] == "finished":
        rows.append(_memory_row(output["memory"], report["errors"]))
        if check.group == "levers":
            rows.append(("step time", f"{output['step_ms']['p50']:,.1f} ms", "beside lever-plain", True))
    if output.get("state") == "oom":
        ended_s = output["started_wall_ns"] / 1e9 + output["seconds"]
        rows.append(at_most("over after the training", report["ended_s"] - ended_s, AFTER_OOM_S, "s", digits=1))
    return rows


def _memory_row(memory: Json, notices: Sequence[str]) -> Row:
    """The predicted peak beside the measured one of a preset's run, or the notice that says why there is none."""
    predicted, measured = memory["predicted_bytes"], memory["peak_allocated_bytes"]
    within = f"within {MEMORY_WITHIN_PERCENT:g} %"
    if not predicted or not measured:
        return "predicted memory", next((line for line in notices if "predicted" in line), "absent"), within, False
    off = 100 * (predicted / measured - 1)
    sizes = f"{predicted / 2**20:,.0f} for {measured / 2**20:,.0f} MiB ({off:+.2f} %)"
    return "predicted memory", sizes, within, abs(off) <= MEMORY_WITHIN_PERCENT


def speed_row(rows: Sequence[Json]) -> Row | None:
    """The speed of `run` against the plain loop, A B B A; None unless all four were measured."""
    speeds = {}
    for row in rows:
        if row["check"] in SPEED and row["ok"]:
            of_run = row.get("throughput", {}).get("samples_per_s", {}).get("median")
            speeds[row["check"]] = of_run or row["result"]["samples_per_s"]
    if len(speeds) < len(SPEED):
        return None
    ours, plain = (statistics.mean(speeds[name] for name in SPEED if kind in name) for kind in ("run", "plain"))
    text = f"{ours:.1f} against {plain:.1f} samples/s ({ours / plain:.3f})"
    return "run against a plain loop", text, f">= {SPEED_AT_LEAST}", ours / plain >= SPEED_AT_LEAST


def run(command: Sequence[str], limit_s: float, variables: Mapping[str, str], stopped: threading.Event) -> Json:
    """Run a command in a session of its own until it ends, the limit is reached or `stopped` is set."""
    began_s = time.monotonic()
    env = {**os.environ, **variables}
    process = subprocess.Popen(
        command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, text=True, errors="replace", start_new_session=True, env=env
    )
    ladder = [(limit_s, signal.SIGINT), (limit_s + LADDER_S, signal.SIGINT), (limit_s + 2 * LADDER_S, signal.SIGKILL)]
    timed_out = False
    while True:
        try:
            out, err = process.communicate(timeout=0.5)
            break
        except subprocess.TimeoutExpired:
            if stopped.is_set() or time.monotonic() - began_s > ladder[0][0]:
                timed_out = True
                os.killpg(process.pid, signal.SIGKILL if len(ladder) == 1 else ladder.pop(0)[1])
    ended_s, output = time.time(), None
    with contextlib.suppress(ValueError):
        output = json.loads("".join(out.splitlines()[-1:]))
    return {
        "exit_code": "timeout" if timed_out else process.returncode,
        "ended_s": ended_s,
        "wall_seconds": round(time.monotonic() - began_s, 1),
        # The object that the last line holds.
        "output": output if isinstance(output, dict) else None,
        "lines": out.splitlines()[-TAIL_LINES:],
        "errors": err.splitlines()[-TAIL_LINES:],
    }


def recorded_seconds() -> dict[str, float]:
    """Seconds of each check in the committed results: its newest row with the right exit code."""
    files = sorted((json.loads(file.read_text()) for file in RESULTS.glob("*.json")), key=lambda each: each["date"])
    expected_ends = {(check.name, check.expect) for check in all_checks()}
    rows = [row for each in files for row in each["rows"] if (row["check"], row.get("exit_code")) in expected_ends]
    return {row["check"]: row["wall_seconds"] for row in rows}


Planned = tuple[str | None, Check, float]
"""Lane, check, expected seconds; no lane if there are too few GPUs."""


def plan(checks: Sequence[Check], recorded: Mapping[str, float], gpus: int) -> list[Planned]:
    """The checks in the order of their starts: the longest first into the lane that is free first, then those alone."""
    usual_s = statistics.median(recorded.values()) if recorded else 30.0
    expected = {check.name: recorded.get(check.name, check.about_s or usual_s) for check in checks}
    planned: list[Planned] = []
    free_s = dict.fromkeys(range(1, LANES + 1), 0.0)
    for check in sorted(checks, key=lambda each: (each.alone, 0.0 if each.alone else -expected[each.name])):
        if check.gpus > gpus:
            planned.append((None, check, 0.0))
        elif check.alone:
            planned.append((ALONE, check, expected[check.name]))
        else:
            lane = min(free_s, key=free_s.__getitem__)
            free_s[lane] += expected[check.name]
            planned.append((f"lane {lane}", check, expected[check.name]))
    return planned


def print_plan(planned: Sequence[Planned], recorded: Mapping[str, float]) -> None:
    """Print each check's lane, expected seconds (~ if none are recorded), right exit code and command; then the sum."""
    in_lanes: dict[str, float] = {}
    for lane, check, seconds in planned:
        in_lanes[lane or ""] = in_lanes.get(lane or "", 0.0) + seconds
        guessed = "" if check.name in recorded else "~"
        where, expected = (lane, f"{guessed}{seconds:.0f} s") if lane else (f"{check.gpus} GPUs", "-")
        print(f"{where:6}  {expected:>6}  {check.name:28}  {check.expect}  {check.words}")
    alone_s = in_lanes.pop(ALONE, 0.0)
    side_by_side_s = max(in_lanes.values(), default=0.0)
    parts = f"{side_by_side_s:.0f} s in {LANES} lanes, then {alone_s:.0f} s alone"
    print(f"{side_by_side_s + alone_s:.0f} s in all: {parts}")


def print_table(session: Session, not_run: Sequence[str]) -> None:
    """Print one line a figure: ok or FAIL, the check, the figure, its bound."""
    lines = []
    for row in session.rows:
        remark = row.get("error") or (f"left out: {row['left_out']}" if "left_out" in row else "")
        figures = [("ok" if held else "FAIL", what, text, bound) for what, text, bound, held in row.get("judged", ())]
        if not figures or remark:
            figures.append((_verdict(row), remark, "", ""))
        lines += [(verdict, row["check"], *rest) for verdict, *rest in figures]
    lines += [("FAIL", name, "not run", "", "") for name in not_run]
    print_columns(lines)
    failed = sum(not row["ok"] for row in session.rows) + len(not_run)
    print(f"{session.head['seconds']:.0f} s, {len(session.rows)} checks, {failed} FAIL; {session.file}")


def _verdict(row: Json) -> str:
    return "–" if "left_out" in row else "ok" if row["ok"] else "FAIL"


def describe(machine: Machine) -> Json:
    """The device, the driver and the versions."""
    return {
        "device": machine.gpus[0].name,
        "gpus": len(machine.gpus),
        "driver": machine.driver_version,
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
        "cores": machine.cores,
        "date": time.strftime("%Y-%m-%d"),
        "note": f"rows with alone=false ran beside up to {LANES - 1} others: their memory counts, their speed does not",
    }


def version(package: str) -> str | None:
    """The version of an installed distribution."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


if __name__ == "__main__":
    sys.exit(main())
