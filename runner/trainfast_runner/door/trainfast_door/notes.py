"""Lines in the run directory, the notes of errors of the door itself, and hooks called once a module is executed."""

from __future__ import annotations

import fcntl
import functools
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from trainfast_runner.worker.shared import process as process

    Hook = Callable[[Any], None]


def load_from_worker(name: str, *path: str) -> Any:
    """Load a file of the worker as a module of this package, once."""
    full_name = f"{__package__}.{name}"
    if full_name not in sys.modules:
        # The worker is installed beside this package, and nothing of it is on the script's path.
        file = os.path.join(os.path.dirname(__file__), "..", "..", "worker", *path)
        spec = importlib.util.spec_from_file_location(full_name, file)
        sys.modules[full_name] = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
        spec.loader.exec_module(sys.modules[full_name])  # type: ignore[union-attr]
    return sys.modules[full_name]


if not TYPE_CHECKING:
    process = load_from_worker("process", "shared", "process.py")

RUN_VARIABLE = "TRAINFAST_RUN"
"""Names the run directory, in the environment of the command and all it starts."""
MAX_NOTES, NOTE_CHARACTERS = 20, 500
"""Chosen, not measured: the most problems that one process notes, and the most of one's text."""

Function = TypeVar("Function", bound="Callable[..., Any]")
_noted: set[str] = set()
"""The problems that this process has noted."""


def write_door_line(directory: str, kind: str, **fields: Any) -> None:
    """Append one line to `door.jsonl`, which is not kept open. Raises OSError."""
    with closing(process.LineFile(os.path.join(directory, "door.jsonl"))) as file:
        file.write({"t_ns": time.monotonic_ns(), "pid": os.getpid(), "kind": kind, **fields})


def never_raises(function: Function) -> Function:
    """Wrap `function` so that each Exception is noted instead of raised; SystemExit, a clean stop, passes."""

    @functools.wraps(function)
    def quiet(*arguments: Any, **keywords: Any) -> Any:
        try:
            return function(*arguments, **keywords)
        except Exception as error:
            # Many hooks have the same name: their module tells them apart. A partial has no name.
            named = getattr(function, "func", function)
            note_error(f"{named.__module__.rpartition('.')[2]}.{named.__name__}", error)
            return None

    return quiet  # type: ignore[return-value]


def follow(
    owner: Any, name: str, before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None
) -> None:
    """Have each call of `owner.name` call `before` with its arguments first, and `after` with its result and arguments.

    Their errors are noted; a SystemExit of either, a clean stop, ends the script.
    """
    function = getattr(owner, name)
    quiet_before, quiet_after = (None if each is None else never_raises(each) for each in (before, after))

    @functools.wraps(function)
    def followed(*arguments: Any, **keywords: Any) -> Any:
        if quiet_before is not None:
            quiet_before(*arguments, **keywords)
        result = function(*arguments, **keywords)
        if quiet_after is not None:
            quiet_after(result, *arguments, **keywords)
        return result

    setattr(owner, name, followed)


def note_error(hook: str, error: Exception) -> None:
    """Append an error of a hook to `door.jsonl`."""
    note(f"{hook}: {type(error).__name__}: {error}")


def note(detail: str) -> None:
    """Append a problem of the hooks to `door.jsonl`; a repeated text, or one after `MAX_NOTES`, is dropped."""
    directory = os.environ.get(RUN_VARIABLE)
    if not directory or detail in _noted or len(_noted) >= MAX_NOTES:
        return
    _noted.add(detail)
    with suppress(OSError, ValueError):  # the run directory is gone, or the disk is full: the script goes on
        write_door_line(directory, "trouble", detail=detail[:NOTE_CHARACTERS])


def hook_modules(hooks: Mapping[str, Hook]) -> None:
    """Call each hook with its module: now, at the end of an execution under way, or when the module is imported.

    A module that imports torch itself is under way when torch's import installs the hooks.
    """
    awaited = {name: hook for name, hook in hooks.items() if name not in sys.modules}
    if awaited:
        sys.meta_path.insert(0, _AwaitedModules(awaited))
    for name in hooks.keys() - awaited.keys():
        module = sys.modules[name]
        spec = getattr(module, "__spec__", None)
        if getattr(spec, "_initializing", False):
            _call_at_end(spec, hooks[name])
        else:
            never_raises(hooks[name])(module)


@never_raises
def _call_at_end(spec: Any, hook: Hook) -> None:
    """Call the hook once the module of `spec` has been executed."""
    if not isinstance(spec, _ExecutedSpec):
        spec.__class__ = _ExecutedSpec
        spec.hooks = []
    spec.hooks.append(hook)


class _ExecutedSpec(ModuleSpec):
    """The spec of a module to execute; importlib sets its `_initializing` to False at the end."""

    hooks: list[Hook]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            self.__class__ = ModuleSpec  # type: ignore[assignment]
            hooks = self.__dict__.pop("hooks")
            # A failed execution has removed the module.
            if self.name in sys.modules:
                for hook in hooks:
                    never_raises(hook)(sys.modules[self.name])


class _AwaitedModules:
    """Finds the awaited modules as the other finders do."""

    def __init__(self, hooks: Mapping[str, Hook]) -> None:
        self._hooks = hooks
        self._finding: set[str] = set()
        """The modules that the other finders look for now."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The spec of an awaited module, which calls the hook if the module is executed; None for any other."""
        if name not in self._hooks or name in self._finding:
            return None
        self._finding.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._finding.discard(name)
        if spec is not None:
            _call_at_end(spec, self._hooks[name])
        return spec


class RankFiles:
    """`steps.jsonl` and `worker.jsonl` of this process's rank.

    The first process of a rank that takes a step records it; loader workers, launchers and grandchildren stay silent.
    """

    def __init__(self, directory: str, steps_from_log: bool) -> None:
        """`steps_from_log`: the supervisor counts steps in the output; no process records any."""
        self.directory = directory
        self.rank = int(os.environ.get("RANK") or 0)
        self.world_size = int(os.environ.get("WORLD_SIZE") or 1)
        self.is_claimed = steps_from_log
        """True if a process records this rank, or if no process is to."""
        self.are_ours = False
        """True if this process records the rank; False in a process forked from this one."""
        self.steps: process.LineFile | None = None
        """The step file, once the rank is claimed."""
        self._worker: process.LineFile | None = None

    def claim(self) -> bool:
        """Claim this rank unless a process records it, or has recorded it; return True if this process does."""
        if self.is_claimed:
            return self.are_ours
        group = sys.modules.get("torch.distributed")
        if group is not None and group.is_available() and group.is_initialized():
            # A script that spawns its ranks itself names none in the environment.
            self.rank, self.world_size = group.get_rank(), group.get_world_size()
        try:
            self.steps = process.LineFile(self._path("steps"), os.O_EXCL)
        except FileExistsError:
            self.is_claimed = True
            note(f"rank {self.rank}: another process takes steps too; only the first one's are recorded")
            return False
        self.is_claimed = self.are_ours = True
        os.register_at_fork(after_in_child=self._leave)
        # Held for the life of this process: a reader that can lock it exclusively knows that the run is over.
        lock = os.open(os.path.join(self.directory, "alive.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_SH)
        never_raises(self.write)("started", pid=os.getpid(), start_ticks=process.start_ticks())
        return True

    def _leave(self) -> None:
        """Record nothing in a process that was forked from this rank's."""
        self.are_ours = False

    def write(self, kind: str, **fields: Any) -> None:
        """Append a line to `worker.jsonl` of this rank."""
        if self._worker is None:
            self._worker = process.LineFile(self._path("worker"))
        self._worker.write({"t_ns": time.monotonic_ns(), "kind": kind, "rank": self.rank, **fields})

    def _path(self, name: str) -> str:
        return os.path.join(self.directory, f"{name}{process.rank_suffix(self.rank)}.jsonl")
