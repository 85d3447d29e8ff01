"""A best-fit search before its first trial: its candidates, what is known of them, and its cost."""
