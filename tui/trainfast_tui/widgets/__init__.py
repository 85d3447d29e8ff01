"""Widgets that draw snapshots and the next run. None reads a device; the knob panel alone lists and saves presets."""
