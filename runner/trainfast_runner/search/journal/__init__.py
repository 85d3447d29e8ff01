"""The lines of a search's journal: those that both kinds share, then those of one kind."""
