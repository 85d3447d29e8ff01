"""Other tools: knobs as their settings, and their settings as knobs."""
