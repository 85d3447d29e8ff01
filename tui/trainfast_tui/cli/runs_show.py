"""`runs show`: one run's result; of a live run what there is so far."""

from __future__ import annotations

import argparse


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("reference", metavar="RUN", help="an id, a unique prefix of one, or last")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print it; exit code 0 however the run ended."""
    from trainfast_runner.home import Home
    from trainfast_tui.cli import summary
    from trainfast_tui.cli.ended import result_of
    from trainfast_tui.cli.output import print_json, say

    home = Home()
    directory = home.directory(home.find(arguments.reference))
    result = result_of(directory)
    if result is not None:
        if arguments.json:
            print_json(result)
        else:
            for line in summary.lines(result):
                say(line)
            for line in _settings(result.knobs):
                say(line)
        return 0
    from trainfast_runner.follow import Follower
    from trainfast_tui.cli.progress import so_far, status_line

    snapshot = Follower(directory).poll()
    if arguments.json:
        print_json(so_far(snapshot))
    else:
        say(f"{snapshot.run_id}  {status_line(snapshot)}")
        say(f"follow it with: trainfast-tui attach {snapshot.run_id}")
    return 0


def _settings(knobs: dict[str, object]) -> list[str]:
    """The knobs that are not at their default."""
    from trainfast_runner.knobs import BY_NAME, defaults

    usual = defaults()
    changed = [
        f"{name}={BY_NAME[name].show(value)}"  # type: ignore[arg-type]
        for name, value in knobs.items()
        if name in BY_NAME and value != usual[name]
    ]
    return [f"settings: {' '.join(changed)}"] if changed else []
