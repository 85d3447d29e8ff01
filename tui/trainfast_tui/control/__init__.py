"""Start, stop, search and predict for the session; nothing here is painted."""
