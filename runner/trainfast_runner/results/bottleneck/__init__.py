"""The bottlenecks of a run: figures of its measured steps, and rules as data."""
