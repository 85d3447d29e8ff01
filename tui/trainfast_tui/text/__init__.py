"""Figures with units, sentences, tables, keys and lines for people; the words of one widget stand beside it.

Modules of the runner that the first frame does not need are imported where they are used.
"""
