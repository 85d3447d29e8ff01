"""Searches of the settings of a preset or a script: `batch` for the largest batch, `best` for the best fit.

Each is recorded in a journal. In both packages `decide` chooses the next step from the journal, `conduct` takes it, and
a follower shows it. `control` starts and stops a search from outside, `journal` has the lines that a search writes.
`bench` and `advice` use the figures that runs and searches measured.
"""
