"""The supervision of runs: a process for each run starts it, samples beside it, stops it, and records its end."""
