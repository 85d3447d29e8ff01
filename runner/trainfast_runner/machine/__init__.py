"""The machine: its devices, what they can do at most, what links them, and who uses them."""
