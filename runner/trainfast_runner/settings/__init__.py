"""The settings of a run: knobs, presets, and the combinations that cannot work."""
