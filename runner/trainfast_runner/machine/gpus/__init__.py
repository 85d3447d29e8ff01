"""The GPUs of the machine: their visibility, choice, health and events."""
