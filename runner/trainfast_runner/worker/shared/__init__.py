"""Everything that the runner and the training process share. Standard library only."""
