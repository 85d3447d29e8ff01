"""Names, limits and functions that the runner and the training process share. Standard library only."""
