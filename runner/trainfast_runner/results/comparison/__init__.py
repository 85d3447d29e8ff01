"""The comparison of two runs: settings, conditions, and the confidence of their difference."""
