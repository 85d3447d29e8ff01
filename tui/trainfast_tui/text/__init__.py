"""The words that several of the screen, the command line and reports show: figures with units, sentences, lines.

Modules of the runner that the first frame does not need are imported where they are used.
"""
