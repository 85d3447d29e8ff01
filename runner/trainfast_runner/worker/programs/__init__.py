"""Programs that the runner starts by path, beside the training itself."""
