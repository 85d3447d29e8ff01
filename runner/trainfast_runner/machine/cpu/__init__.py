"""The CPU: facts, its names in the `devices` knob, the load of other processes, the wait policy of a run's threads."""
