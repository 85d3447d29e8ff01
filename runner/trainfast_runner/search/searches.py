"""The searches of a home: those that a command continues or a screen shows, and the directory of a new one."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from trainfast_runner.errors import UserError
from trainfast_runner.machine.devices import Gpus
from trainfast_runner.machine.processes import boot_id
from trainfast_runner.machine.resource_limits import read_host_free_bytes
from trainfast_runner.records.home import (
    JOURNAL_FILE,
    STAMP_FORMAT,
    Home,
    home_error,
    is_conducted,
    new_id,
    search_directories,
)
from trainfast_runner.records.json_lines import DAMAGE, open_regular, read_all
from trainfast_runner.records.result import Result
from trainfast_runner.records.run_file import SCHEMA
from trainfast_runner.running.planning import RunPlan, plan_script
from trainfast_runner.search.batch_journal import BatchEnded, BatchQuestion
from trainfast_runner.search.best_journal import BestEnded, BestQuestion
from trainfast_runner.search.journal import JournalWriter, SearchQuestion, newest_conducted
from trainfast_runner.settings.knob_values import KnobValue
from trainfast_runner.settings.knobs import KNOBS_BY_NAME, knob
from trainfast_runner.settings.script_preset import ScriptPreset
from trainfast_runner.settings.spec import RunSpec, strategy_of
from trainfast_runner.units import CPU, asks_for_cpu, gibibytes
from trainfast_runner.worker.catalog import allows_warm_trials
from trainfast_runner.worker.shared.host import make_private

BATCH_KIND, BEST_KIND = (str(question.__struct_config__.tag) for question in (BatchQuestion, BestQuestion))
"""Kinds of search, by the first line of their journals."""
END_KINDS = [line.__struct_config__.tag for line in (BatchEnded, BestEnded)]
"""Tags of the lines that end a search."""
SEARCHES_CHECKED_FOR_LIVE = 20
"""Number of newest searches that are checked for a live one."""


class LineHead(msgspec.Struct, frozen=True):
    """The parts of a journal's first line that identify a search, and the end state of its last one.

    `kind` is the tag of the line: BATCH_KIND or BEST_KIND for the first one.
    """

    kind: str = ""
    key: str = ""
    schema: int = SCHEMA
    state: str = ""


def unfinished(home: Home, key: str, kind: str) -> Path | None:
    """Return the newest search of this key and kind if it has no answer and did not fail, else None.

    Raises as `search_directories`.
    """
    for directory in reversed(search_directories(home)):
        question_line = first_line(directory)
        # A newer version's lines may mean something else. Only this search is read whole.
        if question_line.schema <= SCHEMA and (question_line.kind, question_line.key) == (kind, key):
            lines, _ = read_all(directory / JOURNAL_FILE, LineHead)
            end = next((line.state for line in reversed(lines) if line.kind in END_KINDS), None)
            return directory if end in (None, "cancelled") else None
    return None


def first_line(directory: Path) -> LineHead:
    """Return the first line of a search's journal; an empty kind and key if it is unreadable."""
    try:
        with os.fdopen(open_regular(directory / JOURNAL_FILE), "rb") as file:
            return msgspec.json.decode(file.readline(), type=LineHead)
    except (OSError, *DAMAGE):
        return LineHead()


def newest_search(home: Home, kind: str = BATCH_KIND) -> Path | None:
    """Return the newest live search of a kind, else the newest if it is of this boot; None without either.

    Raises as `search_directories`.
    """
    directories = search_directories(home)[::-1][:SEARCHES_CHECKED_FOR_LIVE]
    searches = [directory for directory in directories if first_line(directory).kind == kind]
    live_search = next((directory for directory in searches if is_conducted(directory)), None)
    if live_search is not None or not searches:
        return live_search
    conducted = newest_conducted(searches[0])
    return searches[0] if conducted is not None and conducted.boot_id == boot_id() else None


def new_search(home: Home, name: str) -> Path:
    """Make an empty search directory, its id made as a run's. Raises UserError when the home cannot be written."""
    directory = home.searches / new_id(time.strftime(STAMP_FORMAT, time.gmtime()), name, "search")
    try:
        make_private(directory.parent)
        directory.mkdir(mode=0o700)
    except OSError as error:
        raise home_error(home.path, error) from None
    return directory


def open_search(
    question: SearchQuestion,
    key: str,
    home: Home,
    options: SearchOptions,
    can_continue: Callable[[Path], bool] = Path.exists,
) -> Path:
    """Return the directory of the search this question continues, or of a new one with its first line written.

    Searches with the same `key` ask the same. `can_continue` judges the directory of an unfinished search.
    Raises UserError when the home cannot be written.
    """
    home.create()
    earlier = None if options.fresh else unfinished(home, key, str(question.__struct_config__.tag))
    if earlier is not None and can_continue(earlier):
        return earlier
    directory = new_search(home, question.name)
    journal = JournalWriter(directory)
    journal.write(msgspec.structs.replace(question, search_id=directory.name, key=key))
    journal.close()
    return directory


ScriptPlanner = Callable[[Mapping[str, KnobValue]], RunPlan]
"""Plans the script's run with these knobs."""


def script_planner(
    preset: ScriptPreset, settings: Sequence[str], python: str | None, set_by_search: Collection[str]
) -> ScriptPlanner:
    """Return the planner of a preset's script; the knobs of `set_by_search` are left out of the settings.

    Raises UserError, also in its calls.
    """
    fixed_settings = [setting for setting in settings if setting.partition("=")[0].strip() not in set_by_search]

    def plan_script_run(knobs: Mapping[str, KnobValue]) -> RunPlan:
        knob_settings = [f"{name}={knob(name).text_of(value)}" for name, value in knobs.items()]
        plan = plan_script((), [*fixed_settings, *knob_settings], preset=preset, python=python, trial=True)
        if plan.script is not None and plan.script.hooks_blocked is not None:
            raise UserError(f"the script's steps are not seen: {plan.script.hooks_blocked}", key=preset.name)
        return plan

    return plan_script_run


def incompatible_reason(result: Result, knobs: Collection[str]) -> str | None:
    """Return the reason that a run did not have its settings: the script overrode one of these knobs; else None."""
    for override in result.script.overridden if result.script is not None else ():
        if override.knob in knobs:
            ran = "nothing shows what ran" if override.ran is None else f"{override.ran} ran"
            return f"{override.knob}={override.asked} is incompatible with the script: {ran}, by {override.by}"
    return None


MAX_HASHED_BYTES = 1 << 20
"""The content of a file this large is left out of the hash of a script's command: an interpreter, or data."""
KEY_DIGITS = 16
"""Hex digits of the hash of a question."""


def key_of_question(
    question: SearchQuestion, plan: RunPlan, gpus: Gpus, set_by_search: Collection[str], *asked: object
) -> str:
    """Return the key of a question: a hash of model, data, knobs, what else is `asked`, devices and versions.

    All visible `gpus` are in the key; the journal has those that the search took, the freest at its beginning. The key
    of a script also has its command, and the files that this names by a word, alone or after `=`.
    """
    knobs = {name: value for name, value in question.knobs.items() if name not in set_by_search}
    visible = [gpu.uuid for gpu in gpus]
    nodes = () if plan.placement is None else plan.placement.nodes
    parts = (question.model, question.data, knobs, *asked, plan.device, visible, plan.python, plan.versions, *nodes)
    command = () if plan.script is None else plan.script.command
    files = [Path(plan.cwd, name) for word in command for name in (word, word.partition("=")[2])]
    contents = []
    for path in files:
        with suppress(OSError):
            if path.is_file() and path.stat().st_size < MAX_HASHED_BYTES:
                contents.append(hashlib.sha256(path.read_bytes()).hexdigest())
    script = () if plan.script is None else (command, plan.cwd, contents)
    encoded = msgspec.json.encode((*parts, *script), order="deterministic")
    return hashlib.sha256(encoded).hexdigest()[:KEY_DIGITS]


BATCH_KNOBS = ("batch_size", "grad_accum")
"""The knobs that give one rank's share of the global batch."""
MESH_KNOBS = ("strategy", "tp_degree", "pp_degree")
"""The knobs that decide how many data-parallel ranks share the global batch."""


KnobsKey = tuple[tuple[str, object], ...]
"""Knobs and their values as a dictionary key; for a process, the knobs that need a new process."""


def knobs_key(knobs: Mapping[str, object]) -> KnobsKey:
    """Return knobs and their values as a key."""
    return tuple(sorted(knobs.items(), key=lambda item: item[0]))


def with_knobs(spec: RunSpec, knobs: Mapping[str, KnobValue]) -> RunSpec:
    """Return `spec` with these knobs; those that differ are overrides."""
    return spec.with_overrides(**{name: value for name, value in knobs.items() if spec.knobs[name] != value})


def candidate_spec(spec: RunSpec, knobs: Mapping[str, KnobValue]) -> RunSpec:
    """Return the run of a candidate: `spec` with its knobs. `devices` is a ceiling; a one-device strategy uses one."""
    run_spec = with_knobs(spec, knobs)
    devices = run_spec.knobs["devices"]
    if not strategy_of(run_spec.knobs).one_device or devices is None:
        return run_spec
    one_device: KnobValue = 1
    if asks_for_cpu(devices):
        one_device = CPU
    elif isinstance(devices, str):
        one_device = devices.partition("+")[0] + "+"
    return replace(run_spec, knobs={**run_spec.knobs, "devices": one_device})


def value_text(name: str, value: KnobValue) -> str:
    """Return a knob's value as typed after `--set name=`; for a knob unknown to this version, as recorded."""
    return KNOBS_BY_NAME[name].text_of(value) if name in KNOBS_BY_NAME else str(value)


def takes_warm_trials(knobs: Mapping[str, object]) -> bool:
    """Return True if a process with these knobs can train one setting after another."""
    return allows_warm_trials(*(str(knobs[name]) for name in ("strategy", "engine", "compile")))


@dataclass(frozen=True)
class SearchOptions:
    """Options of a search of either kind; a best-fit search takes the first two."""

    fresh: bool = False
    """True to ignore an unfinished search."""
    wait: bool = False
    """True to queue after a run on the same device."""
    no_oom: bool = False
    """True to never run out of memory on purpose."""
    confirmation_steps: int = 10
    """Steps of the confirmation run."""


FREE_SHARE = 0.9
"""Share of the free host memory that a search may use; the rest is left to other processes."""


@dataclass(frozen=True)
class Limits:
    """Bytes by rank, empty on a GPU without memory_limit, and the source of the limit in words."""

    by_rank: tuple[int, ...]
    source: str


def limits_of(plan: RunPlan) -> Limits:
    """Return the limits of a search of this plan: never beyond the free memory, or the machine would swap."""
    limits_bytes, ranks = plan.memory_limit_bytes, plan.world_size
    source = f"memory_limit={plan.spec.knobs.get('memory_limit')}"
    if plan.device == "cuda":
        # A GPU allocates no more than its memory: each rank reports its own limit.
        if limits_bytes is None:
            return Limits((), "the GPU's free memory, without its context")
        return Limits(limits_bytes, source)
    free_bytes = read_host_free_bytes()
    if limits_bytes is not None and sum(limits_bytes) <= free_bytes:
        return Limits(limits_bytes, source)
    sharing_text = f", shared by {ranks} ranks" if ranks > 1 else ""
    limit_text = f", less than {source}" if limits_bytes is not None else ""
    source = f"{FREE_SHARE:.0%} of the {gibibytes(free_bytes)} free{sharing_text}, set as a real limit{limit_text}"
    return Limits((share_of_free(free_bytes, ranks),) * ranks, source)


def share_of_free(free_bytes: int, ranks: int) -> int:
    """Return the bytes of each rank where all of them share the free host memory, a whole number of MiB."""
    return int(FREE_SHARE * free_bytes / max(1, ranks)) >> 20 << 20
