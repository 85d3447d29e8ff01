"""The best fit: the fastest settings that fit, found by trials and confirmed by cold runs.

A cold run is a run in a fresh process; a trial runs in a warm one, except for scripts. `planning` has the question of
a search and its cost, `survey` checks the candidates on this machine, `measure` tries one, `search.speed` learns the
effect of each knob, `choose` takes the next step and the answer from the journal; `conduct` repeats: decide, measure,
record.
"""
