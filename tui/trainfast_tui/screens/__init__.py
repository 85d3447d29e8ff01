"""One file a screen. A screen is imported by the action that opens it, after the first frame."""
