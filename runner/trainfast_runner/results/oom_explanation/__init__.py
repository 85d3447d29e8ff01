"""The explanation of an ended run that ran out of memory: of a preset's, and of a script's."""
