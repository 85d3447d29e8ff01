"""A user's own script as a run: its command read, planned and started with the hooks."""
