"""Start, stop, search and predict for the session; it words notices and plans, and paints nothing.

Modules of the runner that the first frame does not need are imported where they are used.
"""
