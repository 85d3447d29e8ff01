"""Processes of this machine: their identity, a list of them, children, the sums of a run, signals."""
