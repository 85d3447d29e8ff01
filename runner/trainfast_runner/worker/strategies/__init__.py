"""Strategies: the ways in which ranks share a training, one small file each with a class that is a `Strategy`."""
