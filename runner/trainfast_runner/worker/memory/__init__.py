"""Measures and limits the memory of the training, and sets the allocator."""
