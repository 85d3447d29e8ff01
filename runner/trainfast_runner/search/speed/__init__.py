"""The speed of candidates that were never run: effects of knobs, from measured trials or from the step's work."""
