"""Faults of this machine, now or in the middle of a run, each with its cure."""
