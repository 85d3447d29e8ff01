"""The rows of a bench, their order and warm processes, and the table of their results."""
