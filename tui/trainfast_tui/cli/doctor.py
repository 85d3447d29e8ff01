"""`doctor`: the problems of this machine, each with its cure."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.machine.doctor import Finding, examine, is_healthy
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_file import SCHEMA
from trainfast_runner.units import counted
from trainfast_tui.cli.printing import print_json, print_line
from trainfast_tui.cli.progress import progress_when_slow
from trainfast_tui.text.format import milliseconds, number, to_width

if TYPE_CHECKING:
    from trainfast_runner.machine.calibration import Ceiling

PYTHON_CHECKS = ("training Python", "training stack")
EXAMPLE_OPERATIONS = 1_000
"""The operations of an example step."""


def doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.epilog = (
        "Exit code: 0 whatever is found; 2 for a --python PATH that cannot train; 4 if --calibrate could not measure."
    )
    parser.add_argument("--python", metavar="PATH", help="look at this training Python instead of our own")
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="measure the device's peak TFLOP/s and copy bandwidth, and how many operations a second the host starts;"
        " runs then show their share of it",
    )
    parser.add_argument(
        "--hosts", metavar="A,B", help="look at these machines, or those of a hostfile, and the links between them"
    )
    parser.add_argument("--json", action="store_true", help="print {healthy, checks[...]}, with --hosts also {link}")


def doctor(arguments: argparse.Namespace) -> int:
    """Print the findings; return 0 whatever they are.

    Raises UserError for a `--python` that cannot train (exit code 2), and for a failed calibration (4).
    """
    home = Home()
    if arguments.hosts is not None:
        return _examine_hosts(home, arguments)
    with progress_when_slow("looking at the machine; a driver that does not answer takes a while…"):
        findings = examine(home, arguments.python)
    if not arguments.json:
        _print_findings(findings)
    failed = [finding.finding for finding in findings if finding.name in PYTHON_CHECKS and finding.state == "fail"]
    if failed and arguments.python is not None:
        raise UserError(failed[0], key="python")
    ceiling = None
    if arguments.calibrate:
        from trainfast_runner.machine.calibration import calibrate

        ceiling = calibrate(home, arguments.python)
    if arguments.json:
        measured = {}
        if ceiling is not None:
            measured = {"calibration": {**msgspec.to_builtins(ceiling), "launches_per_s": ceiling.launches_per_s}}
        print_json({"schema": SCHEMA, "healthy": is_healthy(findings), "checks": findings, **measured})
    elif ceiling is not None:
        _print_ceiling(ceiling)
    return 0


def _examine_hosts(home: Home, arguments: argparse.Namespace) -> int:
    """Print the findings about several machines; return 0 whatever they are."""
    # Late: only this form needs ssh and sockets.
    from trainfast_runner.machine.host_checks import examine_hosts
    from trainfast_runner.machine.hosts import parse_hosts

    for option in ("python", "calibrate"):
        if getattr(arguments, option):
            raise UserError(f"--hosts and --{option} exclude each other", key=f"--{option}")
    hosts = parse_hosts(arguments.hosts)
    with progress_when_slow("looking at the hosts, then 5 s of all-reduces between them…"):
        findings, link = examine_hosts(home, hosts)
    if arguments.json:
        print_json({"schema": SCHEMA, "healthy": is_healthy(findings), "checks": findings, "link": link})
    else:
        _print_findings(findings, "over these hosts")
    return 0


def _print_findings(findings: list[Finding], where: str = "here") -> None:
    """Print each finding with its cure, and below whether runs can start there."""
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print_line(f"{finding.state:<4}  {to_width(finding.name, width)}  {finding.finding}")
        if finding.cure:
            print_line(f"      {' ' * width}  cure: {finding.cure}")
    warnings = sum(finding.state == "warn" for finding in findings)
    verdict = f"Runs can be started {where}" + (f"; {counted(warnings, 'warning')}." if warnings else ".")
    print_line(
        "", verdict if is_healthy(findings) else f'Runs cannot start {where}. Fix the checks marked "fail" first.'
    )


def _print_ceiling(ceiling: Ceiling) -> None:
    """Print the measured speeds, with a warning if other processes slowed them down."""
    rates = ", ".join(f"{name} {number(tflops)} TFLOP/s" for name, tflops in ceiling.tflops.items())
    print_line("", f"measured on {ceiling.name}: {rates}; copy {number(ceiling.copy_gb_per_s)} GB/s (read and written)")
    launches = f"{float(f'{ceiling.launches_per_s:.2g}'):,.0f}"
    print_line(
        f"this host launches about {launches} operations a second: a step of {EXAMPLE_OPERATIONS:,} small ones takes at"
        f" least {milliseconds(1000 * EXAMPLE_OPERATIONS / ceiling.launches_per_s)}, however fast the device;"
        " launch-bound models gain from compile and larger batches"
    )
    if ceiling.disturbed:
        words = f"other processes took {100 * (1 - (ceiling.cpu_share or 0)):.0f} % of the CPU meanwhile"
        print_line(f"{words}: the ceiling is too low, measure it again on a quiet machine")
