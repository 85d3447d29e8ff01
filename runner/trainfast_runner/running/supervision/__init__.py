"""The process that starts one run's training, watches it, ends it and records how it ended."""
