"""The run that `r` would start: its settings, where they come from, and its memory and speed."""
