"""Searches of the settings of a preset or a script: `batch_*` for the largest batch, `best` for the best fit.

A search is recorded in a journal. For both kinds `decide` chooses the next step from the journal, a conductor takes
the step, and a follower shows the journal. `control` starts and stops a search from outside, `journal` has the lines
that a search writes and their follower, `conductor` the base of the conductors and the processes that they start,
`searches` the searches of a home. `predicted_speed` predicts the speed of settings that were never run. `bench` runs
variants side by side, and `advice` is that of the guides.
"""
