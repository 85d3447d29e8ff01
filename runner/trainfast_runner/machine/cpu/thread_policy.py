"""The wait policy of a CPU run's OpenMP threads, chosen at launch by the load of other processes.

The runtime's default spins before it sleeps: fastest on an idle machine, and many times slower than sleeping as soon as
one thread has to wait for a core (docs/decisions.md has the figures). The library reads its settings once, when it is
loaded, so load that arrives later is a diagnosis.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainfast_runner.machine.cpu.other_load import others_cores
from trainfast_runner.records.run_file import LaunchThreads
from trainfast_runner.worker.catalog import STRATEGIES
from trainfast_runner.worker.shared.threads import DEFAULT, PASSIVE, PASSIVE_SETTINGS, WAIT_SETTINGS, wait_policy

OBSERVED_S = 1.0
"""Seconds of watching the cores before a launch."""
IDLE_CORES = 0.05
"""Chosen, not measured: share of one core below which others leave the machine idle."""
UNUSED = "unused"


class ThreadPolicy(LaunchThreads, frozen=True, kw_only=True):
    """The wait policy of a launch's OpenMP threads, with the variables that set it."""

    @property
    def env(self) -> dict[str, str]:
        """The variables that the launch sets for the policy."""
        return dict(PASSIVE_SETTINGS) if self.wait == PASSIVE else {}


def thread_variables(
    device: str, strategy: str, cores: int, ranks: int, environment: Mapping[str, str]
) -> dict[str, str]:
    """OMP_NUM_THREADS of a rank where several compute on the host: each has its share of the cores.

    torchrun otherwise gives each rank one thread. Empty for one process, which has what the user's own script would
    have, and where the user has set it.
    """
    on_host = device == "cpu" or STRATEGIES[strategy].offloads
    if not on_host or (ranks == 1 and device == "cpu") or "OMP_NUM_THREADS" in environment:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, cores // ranks))}


def thread_count(environment: Mapping[str, str]) -> int | None:
    """OMP_NUM_THREADS, of the outermost level; None when it is not set or no number, which libgomp ignores too."""
    first = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() else None


def fixed_policy(environment: Mapping[str, str], threads: int | None) -> ThreadPolicy | None:
    """The policy where there is nothing to choose: the user's own settings, or one thread a rank; else None."""
    wait_settings = [name for name in WAIT_SETTINGS if name in environment]
    if wait_settings:
        return ThreadPolicy(wait=wait_policy(environment), reason=f"your own {', '.join(wait_settings)}")
    if threads == 1:
        return ThreadPolicy(wait=UNUSED, reason="one thread a rank, which waits for no other")
    return None


def script_policy(environment: Mapping[str, str], ranks: int) -> ThreadPolicy | None:
    """The policy of a script's threads, which the launch leaves alone; None where a launcher of ranks sets them."""
    if ranks > 1:
        return None
    reason = "nothing in the script's environment sets another"
    return fixed_policy(environment, thread_count(environment)) or ThreadPolicy(wait=DEFAULT, reason=reason)


def choose_policy() -> ThreadPolicy:
    """Choose by the load of others, measured for a second."""
    return policy_beside(others_cores(OBSERVED_S))


def policy_beside(others: float | None) -> ThreadPolicy:
    """The policy when other processes keep `others` cores busy; None if that is unknown."""
    if others is None:
        return ThreadPolicy(wait=PASSIVE, reason="the load of other processes is unknown")
    took = f"other processes used {100 * others:.0f} % of a core before the launch"
    if others < IDLE_CORES:
        return ThreadPolicy(wait=DEFAULT, reason=f"{took}: spinning threads are fastest", others_cores=others)
    return ThreadPolicy(wait=PASSIVE, reason=f"{took}: spinning threads would stall", others_cores=others)
