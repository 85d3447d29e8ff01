"""The speed of a run before it: from the work of a step, the device's calibrated speeds, and earlier runs."""
