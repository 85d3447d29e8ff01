"""One check of `gpu.sh`: a command with a limit of time, its result in a JSON file, and one line about it.

    python -m benchmarks.gpu_check [--expect 0] [--limit 180] [--needs PACKAGE] [--gpus N] [-o DIR] NAME -- ARGUMENT...

The arguments are those of Python (`-m trainfast_tui.cli run ...`). Exit code 0 when it ended as expected or was left
out for want of a package or of GPUs, 1 when it did not.
"""

import argparse
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "accelerate", "bitsandbytes", "deepspeed", "nvidia-ml-py", "textual")
DEVICE = (
    "name",
    "driver_version",
    "memory.total",
    "power.limit",
    "clocks.max.sm",
    "pcie.link.gen.max",
    "mig.mode.current",
)
TAIL_LINES = 40
LADDER_S = 20.0
"""After the limit: SIGINT, which is the first Ctrl-C of a run, then SIGINT again, which kills it, then SIGKILL."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="One check of gpu.sh.")
    parser.add_argument("name")
    parser.add_argument("--expect", type=int, default=0, metavar="CODE", help="the exit code that is right (0)")
    parser.add_argument("--limit", type=float, default=180.0, metavar="S", help="seconds it may take (180)")
    parser.add_argument("--needs", metavar="PACKAGE", help="left out where this distribution is not installed")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="left out where there are fewer GPUs (1)")
    parser.add_argument("-o", "--output", default=".", metavar="DIRECTORY", help="where NAME.json goes")
    parser.add_argument("command", nargs="+", metavar="ARGUMENT", help="what Python is given")
    options = parser.parse_args(arguments)
    report: dict[str, Any] = {
        "check": options.name,
        "command": ["python", *options.command],
        "expected_exit_code": options.expect,
        "devices": devices(),
        "versions": {"python": sys.version.split()[0], **{package: version(package) for package in PACKAGES}},
    }
    why_not = why_left_out(options.needs, options.gpus, report["devices"])
    if why_not is not None:
        report |= {"left_out": why_not}
        passed, remark = True, f"left out: {report['left_out']}"
    else:
        report |= run([sys.executable, *options.command], options.limit)
        passed = report["exit_code"] == options.expect and not report["timed_out"]
        remark = "" if passed else _what_went_wrong(report)
    Path(options.output, f"{options.name}.json").write_text(json.dumps(report, indent=1) + "\n")
    took = f"{report['seconds']:5.0f} s" if "seconds" in report else "    – s"
    print(f"{'ok  ' if passed else 'FAIL'}  {took}  {options.name}{f': {remark}' if remark else ''}", flush=True)
    return 0 if passed else 1


def why_left_out(package: str | None, gpus: int, seen: list[str] | str) -> str | None:
    """Why a check cannot run here: a package or GPUs that it needs; None where it can. `seen` is `devices()`."""
    if package and version(package) is None:
        return f"{package} is not installed"
    # The first line is the heading.
    there = len(seen) - 1 if isinstance(seen, list) else 0
    if gpus > 1 and there < gpus:
        return f"needs {gpus} GPUs, and there {'is 1' if there == 1 else f'are {there}'} here"
    return None


def run(command: Sequence[str], limit_s: float) -> dict[str, Any]:
    """Run it, in a session of its own, for at most so long: exit code, seconds, its JSON or its last lines."""
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    timed_out = False
    for limit, signum in ((limit_s, signal.SIGINT), (LADDER_S, signal.SIGINT), (LADDER_S, signal.SIGKILL)):
        try:
            out, err = process.communicate(timeout=limit)
            break
        except subprocess.TimeoutExpired:
            timed_out = True
            os.killpg(process.pid, signum)
    else:
        out, err = process.communicate()
    return {
        "exit_code": process.returncode,
        "timed_out": timed_out,
        "seconds": round(time.monotonic() - began, 2),
        "output": _as_json(out),
        "stdout_tail": None if _as_json(out) is not None else out.splitlines()[-TAIL_LINES:],
        "stderr_tail": err.splitlines()[-TAIL_LINES:],
    }


def devices() -> list[str] | str:
    """The output of nvidia-smi for each GPU, or why there is none."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return "no nvidia-smi"
    query = [smi, f"--query-gpu={','.join(DEVICE)}", "--format=csv"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return "nvidia-smi does not answer"
    return done.stdout.splitlines() if done.returncode == 0 else (done.stdout + done.stderr).strip()[-300:]


def version(package: str) -> str | None:
    """The version of an installed distribution."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _as_json(text: str) -> Any:
    """The last line as JSON, else the whole text, else None."""
    for candidate in (text.splitlines()[-1:], [text]):
        try:
            return json.loads("".join(candidate))
        except ValueError:
            continue
    return None


def _what_went_wrong(report: dict[str, Any]) -> str:
    if report["timed_out"]:
        return f"did not end in time, exit code {report['exit_code']}"
    output = report["output"] if isinstance(report["output"], dict) else {}
    message = (output.get("error") or {}).get("message") or output.get("reason") or "".join(report["stderr_tail"][-1:])
    return f"exit code {report['exit_code']}, not {report['expected_exit_code']}: {str(message)[:200]}"


if __name__ == "__main__":
    sys.exit(main())
