"""Plans a best-fit search before its start: its question, its candidates, and the search that it continues."""
