"""Presets of the user's own scripts: the flags of knobs in a command, found, checked and saved."""
