"""Start the runs of a command once their devices are free, and follow them to their ends.

Modules that only some uses of a command need are imported where they are used.
"""
