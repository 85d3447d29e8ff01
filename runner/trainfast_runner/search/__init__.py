"""The largest batch that fits: searched by probing one warm process, proved in a fresh one, on record in a journal.

`decide` says what to do next from what the journal holds, `conduct` does it, `follow` shows it, `control` starts and
stops it from outside.
"""
