"""Widgets that paint snapshots; none of them reads a device or a file."""
