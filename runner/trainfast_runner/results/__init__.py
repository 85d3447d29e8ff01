"""The results of a run: its verdict, its summary, its bottlenecks, how it ran out of memory."""
