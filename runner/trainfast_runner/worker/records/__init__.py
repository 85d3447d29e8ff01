"""Writes the records of a training: its steps, what ran, and its errors."""
