"""Figures with units, sentences, tables, keys and lines for people, which several widgets, screens or commands share.

A function called `…_text` returns a value as it is typed or formatted, one called `…_words` a phrase or a sentence.
Modules of the runner that the first frame does not need are imported where they are used.
"""
