"""`run` and `attach`: one training run, from a preset or a script of the user's own, followed to its end.

Modules that only a started run needs are imported where they are used: a refusal stays fast.
"""

from __future__ import annotations

import argparse
import shlex

from trainfast_runner.errors import UserError
from trainfast_runner.machine.hosts import parse_hosts
from trainfast_runner.memory.oom import with_newer_explanation
from trainfast_runner.records.home import Home
from trainfast_runner.records.run_directory import is_alive, read_run_file
from trainfast_runner.running import planning
from trainfast_runner.running.follower import Follower
from trainfast_runner.running.planning import RunPlan
from trainfast_runner.running.present_state import run_state, unfinished_host
from trainfast_runner.running.settling import result_or_none_while_live
from trainfast_runner.search.conductor import Cancelled
from trainfast_runner.settings import script_preset
from trainfast_runner.settings.knobs import KNOBS_BY_NAME
from trainfast_runner.settings.spec import resolve
from trainfast_tui.cli.arguments import add_python, add_run, add_settings, add_wait, directory_of, positive
from trainfast_tui.cli.exit_codes import EXIT_HUNG_UP, EXIT_INTERRUPTED
from trainfast_tui.cli.launching import follow, print_out_of_memory, refuse_script_on_hosts, start_when_free
from trainfast_tui.cli.parser import refuse_script_word
from trainfast_tui.cli.printing import print_json, print_line, print_notice
from trainfast_tui.cli.progress import live_record, print_result, progress_when_slow
from trainfast_tui.cli.signals import caught_signals
from trainfast_tui.text.event_words import launch_notices


def run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "preset",
        metavar="PRESET | -- COMMAND",
        nargs="?",
        help="a name, NAME/VARIANT, or a path ending in .toml; or after -- a command line of your own, as typed",
    )
    add_settings(parser)
    parser.add_argument(
        "--preset",
        metavar="FILE",
        dest="script_preset",
        help="a .toml that names a script's flags; without a command after -- its own is started",
    )
    parser.add_argument("--steps", type=positive, metavar="N", help="end after N optimizer steps; also for a script")
    parser.add_argument(
        "--samples-per-step",
        type=positive,
        metavar="N",
        help="samples of every step of a script on one rank, whatever its hooks see",
    )
    parser.add_argument(
        "--steps-from-log",
        metavar="REGEX",
        help="count a script's steps in its output, one a matching line; group (?P<loss>...) is the loss",
    )
    parser.add_argument(
        "--hosts",
        metavar="FILE|A,B",
        help="train on these machines over ssh, a node each; local is this one, FILE has lines `box1 slots=4`",
    )
    parser.add_argument(
        "--slurm",
        metavar="OPTIONS",
        nargs="?",
        help="queue the run with Slurm, with these options of sbatch in one word, as in --slurm '-N 2 -p gpu'",
    )
    parser.add_argument("--detach", action="store_true", help="print the run's id and leave it running")
    add_wait(parser)
    add_python(parser)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object, the last line")
    parser.epilog = f"Knobs: {', '.join(KNOBS_BY_NAME)}."


def run(arguments: argparse.Namespace) -> int:
    """Start the run, follow it and return its exit code."""
    home = Home().create()
    with progress_when_slow("checking…"):
        plan = _plan_from_arguments(arguments)
    for notice in launch_notices(plan):
        print_notice(notice)

    with caught_signals() as signals:
        try:
            directory = start_when_free(plan, home, signals, wait=arguments.wait)
        except Cancelled:
            return EXIT_HUNG_UP if signals.must_leave else EXIT_INTERRUPTED
        if arguments.detach:
            if arguments.json:
                state = run_state(directory).state
                print_json({"run_id": directory.name, "state": state, "run_dir": str(directory)})
            else:
                print_line(directory.name)
            return 0
        number = Home.of_run(directory).launch_numbers().get(directory.name)
        print_notice(f"{directory.name}, run {number}, is starting")
        result = follow(directory, signals, interrupt_stops=True)
    if result is None:
        return EXIT_HUNG_UP
    if result.state == "oom":
        return print_out_of_memory(directory, result, arguments.python, arguments.json)
    return print_result(result, arguments.json)


def _plan_from_arguments(arguments: argparse.Namespace) -> RunPlan:
    """Plan the run of the preset, or of the command after `--`. Raises UserError unless exactly one is given."""
    if arguments.preset is not None and (arguments.script is not None or arguments.script_preset is not None):
        raise UserError(f"run takes a preset or a command after --, not both: {arguments.preset}", key="--")
    file = arguments.script_preset
    if arguments.preset is not None:
        file = script_preset.path_of(arguments.preset)
    if arguments.script is not None or file is not None:
        refuse_script_on_hosts(hosts=arguments.hosts, slurm=arguments.slurm)
        from trainfast_runner.running.planning import plan_script

        return plan_script(
            arguments.script or (),
            arguments.settings,
            preset=script_preset.load(file) if file is not None else None,
            steps=arguments.steps,
            python=arguments.python,
            samples_per_step=arguments.samples_per_step,
            steps_from_log=arguments.steps_from_log,
        )
    if arguments.preset is None:
        raise UserError("run needs a preset, or a command after --; see trainfast-tui run --help", key="PRESET")
    for option in ("samples_per_step", "steps_from_log"):
        if getattr(arguments, option) is not None:
            name = f"--{option.replace('_', '-')}"
            raise UserError(f"{name} is for a command after --", key=name)
    refuse_script_word([arguments.preset])
    steps = [] if arguments.steps is None else [f"steps={arguments.steps}"]
    hosts = parse_hosts(arguments.hosts)
    try:
        slurm_options = None if arguments.slurm is None else shlex.split(arguments.slurm)
    except ValueError as error:
        raise UserError(f"--slurm={arguments.slurm} is no list of words: {error}", key="--slurm") from None
    if hosts and slurm_options is not None:
        raise UserError("--hosts and --slurm both place the run: one of them", key="--slurm")
    spec = resolve(arguments.preset, [*arguments.settings, *steps])
    return planning.plan_run(spec, arguments.python, hosts=hosts, slurm_options=slurm_options)


def attach_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object, the last line")


def attach(arguments: argparse.Namespace) -> int:
    """Follow the run and return its exit code; 130 if Ctrl-C left it running, 129 if the terminal was closed."""
    directory = directory_of(arguments)
    result = result_or_none_while_live(directory)
    if result is not None:
        return print_result(with_newer_explanation(directory, result), arguments.json)
    host = unfinished_host(directory, read_run_file(directory))
    if host is not None and not is_alive(directory):
        raise UserError(f"{directory.name} is a run of host {host}: attach to it there", key=directory.name)
    with caught_signals() as signals:
        result = follow(directory, signals, interrupt_stops=False)
    if result is not None:
        return print_result(with_newer_explanation(directory, result), arguments.json)
    if signals.must_leave:
        return EXIT_HUNG_UP
    print_notice(f"left {directory.name} running")
    if arguments.json:
        print_json(live_record(Follower(directory).poll()))
    return EXIT_INTERRUPTED
