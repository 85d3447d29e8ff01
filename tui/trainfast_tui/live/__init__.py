"""The reader thread, its frozen snapshots, and the figures and events that are computed from them."""
