"""The results of a run: its verdict, summary, devices' conditions, bottlenecks, and comparison with another run."""
