"""The reader thread and its frozen snapshots."""
