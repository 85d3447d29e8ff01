"""The run that `r` would start: its settings, where they come from, and its memory and speed.

Modules of the runner that the first frame does not need are imported where they are used.
"""
