"""A training that runs beside a measurement, and ends with the benchmark, however that ends."""

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STEPS_WITHIN_S = 180.0


@contextlib.contextmanager
def live_run(app: Sequence[str], environment: Mapping[str, str], settings: Sequence[str], steps: int) -> Iterator[Path]:
    """The directory of a run of `tiny-llama` that has taken so many `steps`.

    `app` starts our program. `environment` names a TRAINFAST_HOME of the benchmark's own, of which every run is stopped
    at the end, and when a signal ends the benchmark. Raises RuntimeError when the run takes no steps.
    """
    before = {number: signal.signal(number, _leave) for number in ENDINGS}
    try:
        wanted = [word for setting in settings for word in ("--set", setting)]
        started = subprocess.run(
            [*app, "run", "tiny-llama", *wanted, "--detach", "--json"],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        run_id = json.loads(started.stdout.splitlines()[-1])["run_id"]
        directory = Path(environment["TRAINFAST_HOME"]) / "runs" / run_id
        _wait(directory, steps)
        yield directory
    finally:
        for number in ENDINGS:
            signal.signal(number, signal.SIG_IGN)
        # By the home and not by its id: a signal may come before the id is known.
        for directory in Path(environment["TRAINFAST_HOME"]).glob("runs/*"):
            subprocess.run([*app, "stop", directory.name, "--now"], env=environment, capture_output=True, check=False)
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _wait(directory: Path, steps: int) -> None:
    deadline = time.monotonic() + STEPS_WITHIN_S
    path = directory / "steps.jsonl"
    while not path.exists() or path.read_bytes().count(b"\n") < steps:
        if time.monotonic() > deadline or (directory / "result.json").exists():
            raise RuntimeError(f"the run takes no steps: see {directory}")
        time.sleep(0.2)
