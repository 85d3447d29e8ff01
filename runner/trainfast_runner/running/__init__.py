"""One process stands over each run: starts it, samples beside it, stops it, and says how it ended."""
