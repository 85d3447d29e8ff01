"""Searches of the settings of a preset or a script: `batch` for the largest batch, `best` for the best fit.

A search is recorded in a journal. In both packages `decide` chooses the next step from the journal, `conduct` takes the
step, and a follower shows the journal. `control` starts and stops a search from outside, `journal` has the lines that a
search writes. `bench` and `advice` use the figures that runs and searches measured. `speed` predicts the speed of
settings that were never run; `conductor`, `search_runs` and `warm_process` start and end a search's processes.
"""
