"""Data of a training: texts and images, the samples cut from them, and their order."""
