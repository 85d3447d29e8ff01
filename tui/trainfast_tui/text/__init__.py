"""Figures with units, sentences, tables, keys and lines for people, which several widgets, screens or commands share.

Modules of the runner that the first frame does not need are imported where they are used.
"""
