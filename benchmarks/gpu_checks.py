"""The checks of `gpu.sh`: commands on a GPU, a line each in `gpu_checks.txt`, in groups.

A line names its group, its name and options (fields of `Check`, and bounds as `path<=number:unit`), and after the bar
the words of a command of the product, or `-m` and a benchmark, which judges its own bounds. A list in braces is a check
for each of its entries, which stands where the words have `{}`.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainfast_runner.worker.catalog import OPTIMIZERS, OptimizerEntry

HERE = Path(__file__).parent
APART = ("first", "search", "levers", "autotune")
"""Groups that run only where they are named: minutes each."""
SPEED = ("plain-1", "run-1", "run-2", "plain-2")
"""Outer runs of a plain loop and of the product, A B B A."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A command of Python. `alone` for one that is timed; the others run side by side."""

    name: str
    group: str
    arguments: tuple[str, ...]
    alone: bool = False
    expect: int = 0
    """The exit code that is right."""
    may_refuse: bool = False
    """True if a refusal by the product leaves the check out, with its reason."""
    needs: str | None = None
    """Left out where this distribution is not installed."""
    gpus: int = 1
    about_s: float | None = None
    """Seconds by its arguments, until a GPU's result is recorded; None for as long as most checks."""
    bounds: tuple[tuple[str, str, float, str], ...] = ()
    """A path in the JSON of the command (a list counts by its length), `<=` or `>=`, the bound, the unit."""

    @property
    def words(self) -> str:
        """The command as a person types it in the checkout."""
        is_cli = self.arguments[1] == "trainfast_tui.cli"
        words = ("trainfast-tui", *self.arguments[2:]) if is_cli else ("python", *self.arguments)
        return " ".join(words).replace(sys.executable, "python").replace(f"{HERE.parent}/", "")


def all_checks() -> Iterator[Check]:
    """Every check, group by group."""
    for line in (HERE / "gpu_checks.txt").read_text().splitlines()[1:]:
        if not line.startswith("#"):
            head, _, words = line.partition("| ")
            group, name, *options = head.replace("OPTIMIZERS", ",".join(OPTIMIZERS)).split()
            several = re.search(r"\{(.*)\}", name)
            for one in several[1].split(",") if several else [""]:
                own_name = name.replace(several[0], one) if several else name
                yield _check(own_name, group, options, words.replace("{}", one).split(), OPTIMIZERS.get(one))


def _check(name: str, group: str, options: list[str], words: list[str], optimizer: OptimizerEntry | None) -> Check:
    """The check of a line with its list replaced by one entry, which may be an optimizer."""
    places = {"PYTHON": sys.executable, "HERE": str(HERE)}
    words = [re.sub("PYTHON|HERE", lambda found: places[found[0]], word) for word in words]
    if words[0] == "-m":
        arguments = ["-m", f"benchmarks.{words[1]}", *words[2:]]
    else:
        settings = [part for word in words for part in (("--set", word) if "=" in word else (word,))]
        arguments = ["-m", "trainfast_tui.cli", *settings]
        arguments.insert(arguments.index("--") if "--" in arguments else len(arguments), "--json")
    given = dict(option.split("=") for option in options if re.match(r"\w+=", option))
    bounds = re.findall(r"([\w.]+)([<>]=)(\d+):(\S+)", " ".join(options))
    return Check(
        name=name,
        group=group,
        arguments=tuple(arguments),
        alone="alone" in options,
        expect=int(given.get("expect", 0)),
        may_refuse="may-refuse" in options,
        needs=given.get("needs") or (optimizer.package if optimizer else None),
        gpus=int(given.get("gpus", 1)),
        about_s=float(given["about"]) if "about" in given else None,
        bounds=tuple((path, sign, float(bound), unit.replace("_", " ")) for path, sign, bound, unit in bounds),
    )
