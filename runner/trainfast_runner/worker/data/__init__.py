"""Data of a training: texts and pictures, the samples cut from them, and their order."""
