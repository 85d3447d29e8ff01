"""The GPUs of the machine: which a run may use, how they are joined, their health and their events."""
