"""Presets of the user's own scripts: the places of knobs in a command, found, checked and saved."""
