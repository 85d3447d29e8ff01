"""A training step without memory: which bytes would be alive when, and what they are for."""
