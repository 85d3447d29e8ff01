"""Processes forked from one that has done their imports: the command line and trainings, without seconds of imports.

`Forks` starts this file with a program: a Python file whose top level imports, and whose `main(arguments)` returns an
exit code. Each run is a process of its own, with its own environment, folder, output and signals. What imports or
starts with a process itself (the linker's variables, malloc, a launcher) is tested in processes that start cold.
"""

import json
import os
import runpy
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

Main = Callable[[list[str]], int | None]


@dataclass(frozen=True)
class Ended:
    """The first exit code that is not 0, or 0; the output of all processes; their CPU time after the imports."""

    code: int
    out: str
    err: str
    cpu_s: float = 0.0


class Forks:
    """Runs one program in forks of a process that starts with the first run."""

    def __init__(self, program: Path, environment: Mapping[str, str] | None = None) -> None:
        self._program, self._environment = program, environment
        self._server: subprocess.Popen[str] | None = None

    def run(
        self, arguments: Sequence[str], environments: Sequence[Mapping[str, str]], folder: Path, patience_s: float
    ) -> Ended:
        """Run one process for each environment, and wait for all; one that fails ends the others.

        Raises TimeoutError, with every process ended, when they take longer than `patience_s`.
        """
        if self._server is None:
            self._server = self._started()
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with TemporaryDirectory() as scratch:
            out, err = (Path(scratch) / name for name in ("out", "err"))
            request = {
                "arguments": list(arguments),
                "environments": [dict(environment) for environment in environments],
                "folder": str(folder),
                "output": [str(out), str(err)],
            }
            self._server.stdin.write(json.dumps(request) + "\n")
            self._server.stdin.flush()
            if not select.select([self._server.stdout], [], [], patience_s)[0]:
                self.close()
                raise TimeoutError(f"{arguments} runs for more than {patience_s:g} s:\n{err.read_text()}")
            line = self._server.stdout.readline()
            assert line, f"{self._program} has failed; its error stands above"
            return Ended(**json.loads(line), out=out.read_text(errors="replace"), err=err.read_text(errors="replace"))

    def close(self) -> None:
        """End the process and all that it has forked."""
        if self._server is not None:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.communicate()
            self._server = None

    def _started(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, __file__, str(self._program)], env=self._environment, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip


def serve(program: Path) -> None:
    """Import what the program imports, then answer one request after the other until stdin ends."""
    main = runpy.run_path(str(program))["main"]
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line), main)), flush=True)


def answer(request: dict[str, Any], main: Main) -> dict[str, float]:
    """Fork the processes of a request, wait for all, and return what `Ended` says of them."""
    running = set()
    for environment in request["environments"]:
        pid = os.fork()
        if pid == 0:
            become(request, environment, main)
        running.add(pid)
    first_failure, cpu_s = 0, 0.0
    while running:
        pid, status, used = os.wait3(0)
        running.discard(pid)
        cpu_s += used.ru_utime + used.ru_stime
        code = os.waitstatus_to_exitcode(status)
        if code and not first_failure:
            first_failure = code
            for other in running:
                os.kill(other, signal.SIGKILL)
    return {"code": first_failure, "cpu_s": cpu_s}


def become(request: dict[str, Any], environment: dict[str, str], main: Main) -> NoReturn:
    """Run the program in this fork as if it had started here, and end."""
    code: Any = 1
    try:
        os.environ.clear()
        os.environ.update(environment)
        time.tzset()
        os.chdir(request["folder"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, path in enumerate(request["output"], start=1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
        code = main(request["arguments"])
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # As the interpreter does: None is 0, and whatever is no number is 1.
        os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
