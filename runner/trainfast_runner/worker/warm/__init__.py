"""Tries many settings or batch sizes in one process, as its parent orders."""
