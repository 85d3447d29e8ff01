"""The bottlenecks of a run: figures of its measured steps, rules as data, and conditions that make figures doubtful."""
