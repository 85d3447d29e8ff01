"""Processes of this machine: their identity, a list of them, the sums of a run, signals."""
