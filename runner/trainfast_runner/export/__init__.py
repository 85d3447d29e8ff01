"""A run's settings in the forms of other tools."""
