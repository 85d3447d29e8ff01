"""The interface between processes: where runs live, the shape of every file, how each is written and read."""
