"""The best fit: the fastest settings that fit, found by trials and confirmed by cold runs.

A cold run is a run in a fresh process; a trial runs in a warm one, except for scripts. `plan` and `opening` have the
question of a search and its cost, `survey` checks the candidates on this machine, `trial` tries one, `search.effects`
learns the effect of each knob, `decide` takes the next step and `answer` the answer from the journal; `conductor`
repeats: decide, measure, record.
"""
