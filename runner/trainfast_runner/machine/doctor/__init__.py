"""What is wrong with this machine, or would be in the middle of a run: each finding with its cure."""
