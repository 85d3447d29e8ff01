"""What the app does: start, stop, search, predict. Nothing here is painted."""
