"""Checks the candidates of a best-fit search on this machine: the refused ones, their memory, bounds on their speed."""
