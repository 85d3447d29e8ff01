"""The base of both conductors, and the runs and warm processes that they start, end and adopt, one at a time."""
