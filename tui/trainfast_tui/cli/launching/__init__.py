"""Start the runs of a command once their devices are free, and follow them to their ends."""
