"""Every word that the screen, the command line and reports share: figures with units, sentences, lines of text.

Modules of the runner that the first frame does not need are imported where they are used.
"""
