"""The supervisor's half of a standby: it waits with its training process, as its child, for a run.

`python -P -m trainfast_runner.running.supervisor --standby ORDER`, with the socket of the one who keeps the standby as
standard input. The fields of ORDER, in JSON: `argv` and `env` of the training process as they would be for a run,
`imports` and `questions` of the worker's standby.py, `ranks` as of `StandbyKey`, and `output`, the file of what the
process prints, which becomes the run's.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainfast_runner.machine.processes import become_subreaper, descendants, send
from trainfast_runner.machine.training_python import own_environment
from trainfast_runner.records.capped_file import OUTPUT_FILE
from trainfast_runner.records.run_file import RunFile
from trainfast_runner.running.ranks import StopRequests

STDIN = 0
PACKET_BYTES = 1 << 16
ENDS_WITHIN_S = 1.0
"""Seconds for a waiting process to end by itself once its socket is closed; it looks for that twice a second."""
IMPORTS_WITHIN_S, GOES_WITHIN_S = 120.0, 10.0
"""Chosen, not measured: seconds for a process to take its run, while it still imports and after that."""


class Standby:
    """A training process that waits for its run, alone or as the ranks of torchrun."""

    def __init__(self, order: dict[str, Any]) -> None:
        """Start the process. Raises OSError if it does not start."""
        become_subreaper()
        self._keeper = socket.socket(fileno=STDIN)
        self._variables: dict[str, str] = order["env"]
        self._ranks = max(1, order["ranks"])
        self._ready = self._gone = 0
        self._output = Path(order["output"])
        questions: int | None = order["questions"]
        self._channel, waiting = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        imports = json.dumps({"imports": order["imports"], "questions": questions})
        with waiting, self._output.open("ab") as output:
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                [*map(str, order["argv"]), "standby", imports],
                env={**own_environment(), **self._variables},
                stdin=waiting.fileno(),
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=() if questions is None else (questions,),
            )
        if questions is not None:
            os.close(questions)

    def wait(self) -> Path:
        """Return the directory of the run. Ends this process and its child where the keeper or the child is gone."""
        while True:
            readable = select.select([self._keeper, self._channel], [], [])[0]
            # The training process ends only without this socket, or by itself.
            if self._channel in readable and not self._read_channel():
                break
            if self._keeper in readable:
                packet = self._keeper.recv(PACKET_BYTES)
                if packet:
                    return Path(os.fsdecode(packet))
                break
        self.end()
        self._output.unlink(missing_ok=True)
        sys.exit()

    def give(self, run: RunFile, directory: Path, requests: StopRequests) -> str:
        """Give the run to the process; return the reason that it does not take it, else an empty text.

        A stop that is asked for meanwhile counts as taken. Raises OSError.
        """
        self._output.rename(directory / OUTPUT_FILE)
        variables = {name: run.env.get(name) for name in (*self._variables, *run.env)}
        go = json.dumps({"run": str(directory), "variables": variables, "cwd": run.cwd}).encode()
        with suppress(OSError):  # it has died
            for _ in range(self._ranks):
                self._channel.send(go)
        heard, since_s = -1, 0.0
        while self._gone < self._ranks and not requests.pending:
            if heard != self._ready + self._gone:
                heard, since_s = self._ready + self._gone, time.monotonic()
            left_s = since_s + (GOES_WITHIN_S if self._ready == self._ranks else IMPORTS_WITHIN_S) - time.monotonic()
            if left_s <= 0:
                return "the standby did not answer"
            requests.wait(left_s, [self._channel.fileno()])
            if not self._read_channel():
                return "the standby died"
        self._channel.close()
        return ""

    def end(self) -> None:
        """End the process and all below it, at once where they do not end by themselves."""
        self._channel.close()
        deadline_s = time.monotonic() + ENDS_WITHIN_S
        while self.process.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.02)
        for left in descendants(os.getpid()):
            send(left, signal.SIGKILL)
        self.process.wait()

    def _read_channel(self) -> bool:
        """Count a rank's words, if there are any; False once no rank has its end of the socket."""
        if not select.select([self._channel], [], [], 0)[0]:
            return True
        try:
            word = self._channel.recv(PACKET_BYTES)
        except OSError:
            return False
        self._ready += word == b"ready"
        self._gone += word == b"gone"
        return bool(word)
