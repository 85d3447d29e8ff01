"""Processes of this machine: told apart, listed, summed over a run, signalled."""
