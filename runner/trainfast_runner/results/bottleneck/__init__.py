"""The bottlenecks of a run: figures from its records, rules as data, and conditions that make figures doubtful."""
