"""The settings of a run: knobs, presets, and their compatibility."""
