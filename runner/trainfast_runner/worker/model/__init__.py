"""Builds the model, its optimizer and its loss, and prepares its weights and precision."""
