"""Start, stop, search and predict for the session; nothing here is painted.

Modules of the runner that the first frame does not need are imported where they are used.
"""
