"""The devices of the monitor, each with all its readings."""
