"""The batch search: probes in one warm process, a confirmation run in a fresh one, all recorded in a journal.

`decide` chooses the next step from the journal, `conduct` takes it, `search_follower` shows it, `control` starts and
stops the search from outside.
"""
