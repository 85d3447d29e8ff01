"""All variants of a preset, run in turn and tabled against each other and the published figures."""
