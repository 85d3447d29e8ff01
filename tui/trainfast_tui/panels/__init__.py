"""Widgets that draw snapshots and the next run. None reads a device; only the knob panel and dialogs use presets."""
