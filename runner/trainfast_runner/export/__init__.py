"""A run's settings in the forms of other tools, and settings of other tools read back."""
