"""Traces a training step on tensors without memory: the timeline of its live bytes, by category."""
