"""The best fit: the fastest settings that fit, found by trials and confirmed by cold runs.

A cold run is a run in a fresh process; a trial runs in a warm one, except for scripts. `question` has the first line of
a search and lists and checks the candidates on this machine, `search.effects` learns the effect of each knob. `decide`
takes the next step and `answer` the answer from the state of the journal; `conductor` repeats: decide, measure, record.
"""
