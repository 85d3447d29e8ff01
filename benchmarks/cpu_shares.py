"""The processor time of the app's monitor: by thread, and by function of the main thread.

    python -m benchmarks.cpu_shares [--seconds 30]

The app runs in a pseudo-terminal under the tests' eight stand-in GPUs, with a clock around a few of its functions.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import as_installed, sampler_cost
from benchmarks.pty_meter import measure

SETTLE_S = 6.0
THREADS = {
    "MainThread": "main thread",
    "trainfast-reader": "reader: files, processes",
    "telemetry-sampler": "sampler: host, waiting for NVML",
    "nvml-calls": "sampler: calls into NVML",
    "nvml-xid": "waiting for Xid events",
    "textual-output": "writing to the terminal",
    "textual-input": "reading keys",
}


def shares(environment: Mapping[str, str], seconds: float = 30.0) -> dict[str, float]:
    """Percent of a core by what it was spent on."""
    as_installed.app()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "shares.json"
        command = [sys.executable, "-m", "benchmarks.cpu_shares", "--inside", str(report), "--seconds", str(seconds)]
        home = str(Path(__file__).resolve().parents[1])
        measure(command, seconds=seconds + 3, settle=SETTLE_S, keys=[(1.0, "m")], env=dict(environment), cwd=home)
        shares: dict[str, float] = json.loads(report.read_text())
    return shares


def words(shares: Mapping[str, float]) -> str:
    """A line for each."""
    lines = [f"  {percent:5.2f} %  {name}" for name, percent in shares.items()]
    return "\n".join(["where the CPU goes, of a core:", *lines, f"  {sum(shares.values()):5.2f} %  all of it"])


class _Clock:
    """The thread's own time that passes in some functions."""

    def __init__(self) -> None:
        self.spent_s: dict[str, float] = {}

    def around(self, owner: Any, name: str, what: str) -> None:
        """Count the time in this method as `what`."""
        inner = getattr(owner, name)
        self.spent_s[what] = 0.0

        def timed(*arguments: Any, **named: Any) -> Any:
            began_s = time.thread_time()
            try:
                return inner(*arguments, **named)
            finally:
                self.spent_s[what] += time.thread_time() - began_s

        setattr(owner, name, timed)


def _inside(report: Path, seconds: float) -> int:
    """The app itself, which writes its report before the measurement ends."""
    from textual._compositor import Compositor

    from trainfast_tui.app import TrainfastApp
    from trainfast_tui.cli import main
    from trainfast_tui.terminal.frame_output import TightUpdate

    clock = _Clock()
    clock.around(TrainfastApp, "on_posted_message", "main thread: from a snapshot to rows")
    clock.around(Compositor, "render_update", "main thread: from rows to strips")
    clock.around(TightUpdate, "render_segments", "main thread: what differs, as control sequences")

    def threads() -> dict[str, float]:
        return {
            THREADS.get(thread.name, thread.name): time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            for thread in threading.enumerate()
            if thread.ident is not None and thread is not threading.current_thread()
        }

    def watch() -> None:
        time.sleep(SETTLE_S)
        before = {**threads(), **clock.spent_s}
        began_s = time.monotonic()
        time.sleep(seconds)
        length_s = time.monotonic() - began_s
        after = {**threads(), **clock.spent_s}
        spent = {name: 100 * (s - before[name]) / length_s for name, s in after.items() if name in before}
        named = sum(spent[name] for name in clock.spent_s)
        spent["main thread: the event loop and the rest"] = spent.pop("main thread") - named
        report.write_text(json.dumps({name: spent[name] for name in sorted(spent) if spent[name] >= 0.005}))

    threading.Thread(target=watch, name="watch", daemon=True).start()
    return main([])


def run(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Where the CPU time of the monitor goes.")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside is not None:
        return _inside(options.inside, options.seconds)
    with tempfile.TemporaryDirectory() as folder:
        environment = {**sampler_cost.stand_in(Path(folder)), "TRAINFAST_HOME": str(Path(folder) / "home")}
        print(words(shares(environment, options.seconds)))
    return 0


if __name__ == "__main__":
    sys.exit(run())
