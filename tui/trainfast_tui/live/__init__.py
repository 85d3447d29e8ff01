"""What is read while the app runs: the reader thread and its frozen snapshots."""
