"""The results of a run: its verdict, its summary, its bottlenecks, its lack of memory."""
