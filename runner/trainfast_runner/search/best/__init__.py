"""The best fit: the fastest settings that fit, found by trials and confirmed by runs in fresh processes.

`question` says what is searched and what it costs, `measure` tries one candidate, `search.speed` learns what each knob
gives, `choose` takes the next step and the answer from the journal; `conduct` repeats: decide, measure, record.
"""
