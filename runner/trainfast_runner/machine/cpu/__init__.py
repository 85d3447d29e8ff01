"""The CPU: facts, the load of other processes, the wait policy of a run's threads."""
