"""What holds a run back: figures from its records, rules as data, and the conditions that make figures doubtful."""
