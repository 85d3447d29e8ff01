"""The machine: its devices, their peak rates, links and readings, and the processes on them."""
