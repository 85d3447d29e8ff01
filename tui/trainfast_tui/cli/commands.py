"""The names of all commands with a line of help each; it imports no module of ours, so that `--help` stays fast."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A command: its words as typed, and the module of this folder that runs it.

    The functions of `runs list` are `runs_list`, which returns the exit code, and `runs_list_arguments`.
    """

    words: tuple[str, ...]
    module: str
    help: str
    takes_script: bool = False
    """True if a command line of the user's own may follow, after `--`."""

    @property
    def function(self) -> str:
        """The name of its function in its module."""
        return "_".join(self.words).replace("-", "_")


COMMANDS = (
    Command(
        ("run",),
        "run",
        "train a preset or a script of your own, show its progress, print the figures",
        takes_script=True,
    ),
    Command(("search", "max-batch"), "search_max_batch", "the largest batch that fits, confirmed in a fresh process"),
    Command(("search", "best"), "search_best", "the fastest settings that fit, confirmed in fresh processes"),
    Command(("predict",), "predict", "the memory a run needs, by category, and its speed, without running it"),
    Command(("bench",), "bench", "a preset's variants, or a grid of settings, as a table against the baseline"),
    Command(("runs", "list"), "runs_list", "all runs, newest first"),
    Command(("runs", "show"), "runs_show", "one run's result"),
    Command(("runs", "compare"), "runs_compare", "which settings differ and what changed"),
    Command(("runs", "rm"), "runs_rm", "delete runs"),
    Command(("runs", "prune"), "runs_prune", "delete old runs and searches, and unused cache files"),
    Command(("logs",), "logs", "the output of a run's training"),
    Command(("stop",), "stop", "stop a live run"),
    Command(("attach",), "attach", "follow a live run; Ctrl-C leaves it running"),
    Command(("export",), "export", "a run's settings for a script of your own"),
    Command(("report",), "report", "runs or a search in one file, .html or .md, with tables and pictures"),
    Command(("presets", "list"), "presets_list", "all presets"),
    Command(("presets", "show"), "presets_show", "a preset's model, data, settings and variants"),
    Command(
        ("presets", "new"),
        "presets_new",
        "make a preset of your own from another, or from a script's flags",
        takes_script=True,
    ),
    Command(("knobs",), "knobs", "every setting of --set: what it does to speed and memory, and its values"),
    Command(("monitor",), "monitor", "this machine's GPUs and host, live"),
    Command(("topo",), "topo", "how the GPUs are connected, and what it means for the strategies"),
    Command(("doctor",), "doctor", "problems of this machine, each with its cure"),
)
REMOVED = {
    "import": "presets new NAME -- COMMAND makes a preset of a script's command",
    "--onto": "--to prints the settings for your script",
    "--prove": "run -- COMMAND runs your script with them",
    "--cool-to": "monitor shows the temperature to wait for, and a result says if its run was hot",
}
"""The present way to the job of each removed command or option."""
GROUP_HELP = {
    "search": "what fits, and what is fastest",
    "runs": "history and live runs",
    "presets": "recipes, shipped and your own",
}
"""The help of the first word of commands with two."""
