"""The lines of a search's journal: what both kinds share, and those of each."""
