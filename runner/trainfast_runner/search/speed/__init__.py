"""The speed of candidates nobody has run: what each knob gives, from measured trials or from the step's work."""
