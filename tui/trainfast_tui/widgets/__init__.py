"""Widgets that draw snapshots; none reads a device or a file."""
