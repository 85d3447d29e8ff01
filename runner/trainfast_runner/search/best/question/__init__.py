"""A best-fit search before its first trial: its candidates, their known figures, and its cost."""
