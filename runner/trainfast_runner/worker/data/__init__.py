"""From `[data]` to micro-batches: texts and pictures, the samples cut from them, their order."""
